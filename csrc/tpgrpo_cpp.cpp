// CPU kernels with a C interface on raw pointers, loaded with ctypes by tpgrpo_fast/_cpp.py. Nothing here knows torch,
// so one binary serves every version of it.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "dispatch.h"
#include "philox.h"

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
TPGRPO_TARGET_BEGIN("avx2,fma")
namespace avx2 {
#define TPGRPO_BYTES 32
#include "kernels.inc"
#undef TPGRPO_BYTES
}  // namespace avx2
TPGRPO_TARGET_END

TPGRPO_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,fma")
namespace avx512 {
#define TPGRPO_BYTES 64
#include "kernels.inc"
#undef TPGRPO_BYTES
}  // namespace avx512
TPGRPO_TARGET_END
#endif

using FillNormals = void (*)(float*, int64_t, int64_t, RowCounter, Key);

FillNormals select_fill_normals(Isa isa) {
#if defined(TPGRPO_X86)
  if (isa >= kAvx512) return avx512::fill_normals;
  if (isa >= kAvx2) return avx2::fill_normals;
#endif
  (void)isa;
  return baseline::fill_normals;
}

// Work of one task: large enough to hide the cost of handing it out, small enough to share one row among threads.
constexpr int64_t kTask = 16 * kBlock;
constexpr int64_t kSerialBelow = 4 * kTask;

}  // namespace
}  // namespace tpgrpo

// Raised whenever a signature below changes, so that a stale library is refused and not called.
TPGRPO_EXPORT int tpgrpo_abi_version() { return 1; }

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
  if (rows <= 0 || elements <= 0) return;
  const Key key{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  const FillNormals fill = select_fill_normals(std::min(static_cast<Isa>(max_isa), best_isa()));
  const int64_t tasks_per_row = (elements + kTask - 1) / kTask;
  const int64_t tasks = rows * tasks_per_row;
  const int threads = rows * elements < kSerialBelow ? 1 : std::max(num_threads, 1);
  (void)threads;  // unused where there is no OpenMP
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t row = task / tasks_per_row;
    const int64_t begin = (task % tasks_per_row) * kTask;
    const RowCounter counter{static_cast<uint32_t>(step[row]), static_cast<uint32_t>(row_uid[row]), iteration};
    fill(out + row * elements + begin, begin, std::min(kTask, elements - begin), counter, key);
  }
}
