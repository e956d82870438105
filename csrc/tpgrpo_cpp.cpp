// CPU kernels with a C interface on raw pointers, loaded with ctypes by tpgrpo_fast/_cpp.py. Nothing here knows torch,
// so one binary serves every version of it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "dispatch.h"
#include "philox.h"
#include "steps.h"

#define TPGRPO_EXPORT extern "C" __attribute__((visibility("default")))

namespace tpgrpo {
namespace {

constexpr int kBlockQuads = 64;
constexpr int kBlock = 4 * kBlockQuads;

namespace baseline {
#define TPGRPO_BYTES 16
#include "kernels.inc"
#undef TPGRPO_BYTES
}  // namespace baseline

#if defined(TPGRPO_X86)
TPGRPO_TARGET_BEGIN("avx2,fma,f16c")
namespace avx2 {
#define TPGRPO_BYTES 32
#include "kernels.inc"
#undef TPGRPO_BYTES
}  // namespace avx2
TPGRPO_TARGET_END

TPGRPO_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
namespace avx512 {
#define TPGRPO_BYTES 64
#include "kernels.inc"
#undef TPGRPO_BYTES
}  // namespace avx512
TPGRPO_TARGET_END
#endif

// The best kernels of this CPU up to max_isa.
const Kernels& select_kernels(int max_isa) {
#if defined(TPGRPO_X86)
  const Isa isa = std::min(static_cast<Isa>(max_isa), best_isa());
  if (isa >= kAvx512) return avx512::kKernels;
  if (isa >= kAvx2) return avx2::kKernels;
#endif
  (void)max_isa;
  return baseline::kKernels;
}

// Work of one task: large enough to hide the cost of handing it out, small enough to share one row among threads. It
// also fixes the order of summation, whatever the number of threads.
constexpr int64_t kChunk = 16 * kBlock;
constexpr int64_t kSerialBelow = 4 * kChunk;

int64_t chunks_of(int64_t elements) { return (elements + kChunk - 1) / kChunk; }

// Calls work(task, span) for every chunk of every row; tasks are numbered row by row.
template <class Work>
void for_each_chunk(int64_t rows, int64_t elements, int num_threads, const Work& work) {
  const int64_t chunks = chunks_of(elements), tasks = rows * chunks;
  const int threads = rows * elements < kSerialBelow ? 1 : std::max(num_threads, 1);
  (void)threads;  // unused where there is no OpenMP
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t begin = task % chunks * kChunk;
    work(task, Span{task / chunks, begin, std::min(kChunk, elements - begin)});
  }
}

// Asks for huge pages under a large output. The first write to a fresh page costs far more than the arithmetic on it, and
// a large tensor is fresh memory more often than not. Where the system declines, nothing changes.
void prefer_huge_pages(const void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHuge - 1) & ~(kHuge - 1), end = (address + bytes) & ~(kHuge - 1);
  if (data && begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

void prefer_huge_pages(const Array& array, int64_t count) {
  prefer_huge_pages(array.data, count * (array.dtype == kFloat32 ? 4 : 2));
}

// Log-prob of one row from its sum of squared errors.
float log_prob(const Step& p, int64_t row, double error) {
  const double c = p.c[row], elements = static_cast<double>(p.elements);
  if (c == 0) return 0;
  const double reduced = p.reduce_sum ? error : error / elements;
  if (p.unscaled) return static_cast<float>(-reduced);
  const double constant = std::log(c) + 0.91893853320467274178;  // log sqrt(2 pi)
  return static_cast<float>(-0.5 * reduced / (c * c) - constant * (p.reduce_sum ? elements : 1.0));
}

// The sums of whole rows, added up chunk after chunk.
std::vector<Sums> row_sums(const Step& p, const Array& next_sample, const Array& velocity_ref) {
  const Kernels& kernels = select_kernels(p.max_isa);
  const int64_t chunks = chunks_of(p.elements);
  std::vector<Sums> partial(static_cast<size_t>(p.rows * chunks)), total(static_cast<size_t>(p.rows));
  for_each_chunk(p.rows, p.elements, p.num_threads, [&](int64_t task, Span span) {
    partial[task] = kernels.squared_distances(p, next_sample, velocity_ref, span);
  });
  for (int64_t task = 0; task < p.rows * chunks; ++task) {
    total[task / chunks].error += partial[task].error;
    total[task / chunks].deviation += partial[task].deviation;
  }
  return total;
}

}  // namespace
}  // namespace tpgrpo

// Raised whenever a signature below changes, so that a stale library is refused and not called.
TPGRPO_EXPORT int tpgrpo_abi_version() { return 4; }

// 0 baseline, 1 AVX2 and FMA, 2 AVX-512: the best level of this CPU.
TPGRPO_EXPORT int tpgrpo_best_isa() { return tpgrpo::best_isa(); }

TPGRPO_EXPORT int tpgrpo_has_openmp() {
#if defined(_OPENMP)
  return 1;
#else
  return 0;
#endif
}

// out[m][4] = Philox-4x32-10 of counters[m][4]; 32-bit words in 64-bit cells.
TPGRPO_EXPORT void tpgrpo_philox_bits(const int64_t* counters, uint64_t key, int64_t count, int64_t* out) {
  const tpgrpo::Key k{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
  for (int64_t m = 0; m < count; ++m) {
    uint32_t c[4];
    for (int i = 0; i < 4; ++i) c[i] = static_cast<uint32_t>(counters[4 * m + i]);
    tpgrpo::philox_4x32_10(c, k);
    for (int i = 0; i < 4; ++i) out[4 * m + i] = c[i];
  }
}

// out[rows][elements]; row_uid and step have one entry a row. The instruction set is the best of the CPU up to max_isa.
TPGRPO_EXPORT void tpgrpo_philox_normal(float* out, int64_t rows, int64_t elements, uint64_t seed,
                                        const int64_t* row_uid, uint32_t iteration, const int64_t* step,
                                        int num_threads, int max_isa) {
  using namespace tpgrpo;
  const Key key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const Kernels& kernels = select_kernels(max_isa);
  for_each_chunk(rows, elements, num_threads, [&](int64_t, Span span) {
    const RowCounter row{static_cast<uint32_t>(step[span.row]), static_cast<uint32_t>(row_uid[span.row]), iteration};
    kernels.fill_normals(out + span.row * elements + span.begin, span.begin, span.count, row, key);
  });
}

// The step kernels; steps.h says what they compute.
TPGRPO_EXPORT void tpgrpo_sde_step(const tpgrpo::SdeStep* p) {
  using namespace tpgrpo;
  const Kernels& kernels = select_kernels(p->step.max_isa);
  const int64_t rows = p->step.rows, elements = p->step.elements, chunks = chunks_of(elements);
  prefer_huge_pages(p->next_sample, rows * elements);
  prefer_huge_pages(p->mean, rows * elements);
  prefer_huge_pages(p->ode_first, p->ode_rows * elements);
  std::vector<double> partial(static_cast<size_t>(rows * chunks));
  for_each_chunk(rows, elements, p->step.num_threads,
                 [&](int64_t task, Span span) { partial[task] = kernels.sde_step(*p, span); });
  for (int64_t row = 0; row < rows; ++row) {
    double error = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) error += partial[row * chunks + chunk];
    p->log_prob[row] = log_prob(p->step, row, error);
  }
}

TPGRPO_EXPORT void tpgrpo_step_log_prob(const tpgrpo::LogProb* p) {
  using namespace tpgrpo;
  const std::vector<Sums> sums = row_sums(p->step, p->next_sample, Array{nullptr, kFloat32});
  for (int64_t row = 0; row < p->step.rows; ++row) p->log_prob[row] = log_prob(p->step, row, sums[row].error);
}

TPGRPO_EXPORT void tpgrpo_grpo_loss(const tpgrpo::Loss* p) {
  using namespace tpgrpo;
  const std::vector<Sums> sums = row_sums(p->step, p->next_sample, p->velocity_ref);
  for (int64_t row = 0; row < p->step.rows; ++row) {
    const double weight = p->weight[row], b = p->step.b[row];
    const double advantage = std::min(std::max<double>(p->advantage[row], -p->adv_clip), p->adv_clip);
    // The difference of log-probs as they are stored, so that equal policies have ratio 1.
    const double ratio = std::exp(double{log_prob(p->step, row, sums[row].error)} - p->old_log_prob[row]);
    const double unclipped = -advantage * ratio;
    const double clipped = -advantage * std::min(std::max(ratio, 1 - p->clip_range), 1 + p->clip_range);
    const bool is_clipped = unclipped < clipped;  // false for NaN, which therefore gets through
    p->ratio[row] = static_cast<float>(ratio);
    p->policy[row] = static_cast<float>(weight * (is_clipped ? clipped : unclipped));
    p->grad_log_prob[row] = is_clipped ? 0.0f : static_cast<float>(weight * unclipped);
    p->kl[row] = 0;
    if (p->velocity_ref.data) {
      const double mean = sums[row].deviation / static_cast<double>(p->step.elements);
      p->kl[row] = static_cast<float>(weight * p->inv_two_var_kl[row] * b * b * mean);
    }
  }
}

TPGRPO_EXPORT void tpgrpo_gradients(const tpgrpo::Gradient* p) {
  using namespace tpgrpo;
  const Step& step = p->step;
  const Kernels& kernels = select_kernels(step.max_isa);
  prefer_huge_pages(p->grad_velocity, step.rows * step.elements);
  prefer_huge_pages(p->grad_velocity_uncond, step.rows * step.elements);
  const double elements = static_cast<double>(step.elements);
  for_each_chunk(step.rows, step.elements, step.num_threads, [&](int64_t, Span span) {
    const double b = step.b[span.row], c = step.c[span.row];
    RowGradient factors{0, 0};
    if (c != 0) {
      const double scale = (step.unscaled ? 2 : 1 / (c * c)) / (step.reduce_sum ? 1 : elements);
      factors.along_error = static_cast<float>(p->grad_log_prob[span.row] * scale * b);
    }
    if (p->velocity_ref.data)
      factors.along_deviation =
          static_cast<float>(p->grad_kl[span.row] * 2.0 * p->inv_two_var_kl[span.row] * b * b / elements);
    kernels.gradients(*p, factors, span);
  });
}
