"""Rewards: functions of images and prompts."""
