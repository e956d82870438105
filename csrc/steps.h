// Records of the step kernels: plain structures that tpgrpo_fast/_cpp.py mirrors field by field.
//
// With the guided velocity v = v_uncond + g (v_cond - v_uncond), or v_cond where there is no v_uncond, every step is
//
//   mean = a x + b v,    x' = mean + c eps,    log p = -S / (2 c^2) - E log(c sqrt(2 pi)),   S = sum (x' - mean)^2
//
// with a, b, c one number a row, and x' rounded to its storage type before S. Averaged log-probs are those divided by
// the E elements of a row; unscaled ones are -S alone. Rows with c = 0 have log p = 0.
#pragma once

#include <cstdint>

#include "philox.h"

namespace tpgrpo {

enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// [rows][elements] without gaps; data is null where an optional array is absent.
struct Array {
  void* data;
  int64_t dtype;
};

// What all step kernels read. Pointers to numbers have one entry a row; coefficients are rounded to float32 for the
// arithmetic on elements only.
struct Step {
  int64_t rows, elements;
  Array velocity, velocity_uncond, sample;
  const double *a, *b, *c;
  double guidance_scale;
  int32_t unscaled, reduce_sum;
  int32_t num_threads, max_isa;
};

struct SdeStep {
  Step step;
  Array noise;  // null: Philox normals of the counters below
  uint64_t seed;
  int64_t iteration;
  const int64_t *row_uid, *stream_step;  // null where no noise is drawn
  Array next_sample;                     // out
  Array mean;                            // out, float32, may be null
  int64_t ode_rows;                      // the first rows, which have an ode_first
  const double* b_ode;                   // [ode_rows]
  Array ode_first;                       // out [ode_rows]: sample + b_ode v, the Euler step of the same velocity
  float* log_prob;                       // out
};

struct LogProb {
  Step step;
  Array next_sample;
  float* log_prob;  // out
};

// policy = w max(-A r, -A clip(r)) with r = exp(log p - old log p), kl = w k b^2 mean((v - v_ref)^2), one of each a row.
struct Loss {
  Step step;
  Array next_sample, velocity_ref;
  const double* inv_two_var_kl;  // k
  const float *old_log_prob, *advantage, *weight;
  double clip_range, adv_clip;
  float *ratio, *policy, *kl, *grad_log_prob;  // out; the last is d policy / d log p
};

// Gradients of sum_rows (grad_log_prob log p + grad_kl k b^2 mean((v - v_ref)^2)).
struct Gradient {
  Step step;
  Array next_sample, velocity_ref;
  const double* inv_two_var_kl;  // null without velocity_ref
  const float *grad_log_prob, *grad_kl;
  Array grad_velocity, grad_velocity_uncond;  // out
};

// A chunk of a row.
struct Span {
  int64_t row, begin, count;
};

// S and sum (v - v_ref)^2 of a chunk or a row.
struct Sums {
  double error = 0, deviation = 0;
};

// Factors of one row in its gradients: d loss / d v = along_error (x' - mean) + along_deviation (v - v_ref).
struct RowGradient {
  float along_error, along_deviation;
};

// The kernels of one instruction set, each for one chunk.
struct Kernels {
  void (*fill_normals)(float* out, int64_t begin, int64_t count, RowCounter row, Key key);
  double (*sde_step)(const SdeStep& p, Span span);
  Sums (*squared_distances)(const Step& p, const Array& next_sample, const Array& velocity_ref, Span span);
  void (*gradients)(const Gradient& p, RowGradient factors, Span span);
};

}  // namespace tpgrpo
