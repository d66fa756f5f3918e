// How a group of 32 values by 32 columns lies in memory, per weight format.
#pragma once

#include "quantized.h"

namespace hs {

constexpr int kSteps = 8;                             // of four values along K
constexpr int kStepBytes = kPanelColumns * 4;
constexpr int kGroupBytes = kSteps * kStepBytes;      // one byte a value
constexpr int kHalfBytes = kGroupBytes / 2;           // one nibble a value

struct Int8Group {
  uint8_t q[kGroupBytes];
};
struct Q8_0Group {
  uint16_t d[kPanelColumns];
  uint8_t q[kGroupBytes];
};
struct Q4_0Group {
  uint16_t d[kPanelColumns];
  uint8_t q[kHalfBytes];
};
struct Q4_1Group {
  uint16_t d[kPanelColumns];
  uint16_t m[kPanelColumns];
  uint8_t q[kHalfBytes];
};

// Of value `i` of a group and column `j`, among the bytes; nibbles: value i - 16 has the upper half of the byte of value i.
inline int byte_index(int i, int j) { return (i / 4 * kPanelColumns + j) * 4 + i % 4; }

}  // namespace hs
