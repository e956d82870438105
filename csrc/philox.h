// Counter-based standard normals: Philox-4x32-10 followed by Box-Muller.
//
// Element e of a row takes word e % 4 of the Philox block with key (seed low, seed high) and counter
// (e / 4, step, row uid, iteration). Words (r0, r1) make the normals 0 and 1, words (r2, r3) the normals 2 and 3:
//
//   u1 = ((r0 >> 8) + 1) * 2^-24 in (0, 1],   u2 = (r1 >> 8) * 2^-24 in [0, 1)
//   n0 = sqrt(-2 ln u1) cos(2 pi u2),         n1 = sqrt(-2 ln u1) sin(2 pi u2)
#pragma once

#include <cstdint>

namespace tpgrpo {

struct Key {
  uint32_t lo, hi;
};

struct RowCounter {
  uint32_t step, row_uid, iteration;
};

constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;  // multipliers
constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;  // key increments
constexpr int kPhiloxRounds = 10;

// Philox-4x32-10 of Salmon et al. (SC 2011), in place.
inline void philox_4x32_10(uint32_t c[4], Key key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxM0} * c[0], p1 = uint64_t{kPhiloxM1} * c[2];
    c[0] = static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ key.lo;
    c[1] = static_cast<uint32_t>(p1);
    c[2] = static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ key.hi;
    c[3] = static_cast<uint32_t>(p0);
    key.lo += kPhiloxW0;
    key.hi += kPhiloxW1;
  }
}

}  // namespace tpgrpo
