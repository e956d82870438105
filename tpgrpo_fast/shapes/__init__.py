"""The embedded default task: a miniature of GenEval with its own prompts, reward and Stable Diffusion 3 pipeline."""

from importlib.resources import files
from pathlib import Path

from tpgrpo_fast.shapes.prompts import heldout_prompts, train_prompts
from tpgrpo_fast.shapes.reward import shapes_reward

__all__ = ["heldout_prompts", "pipeline_path", "shapes_reward", "train_prompts"]


def pipeline_path() -> Path:
    """Folder of the embedded pipeline, for `diffusers.StableDiffusion3Pipeline.from_pretrained`."""
    return Path(str(files(__name__) / "pipeline"))
