// Packing of quantized weights into panels, once per weight, and the way back for rows of an embedding.
//
// Blocks come as GGUF files hold them: per row and group of 32, the scales (float16) and then the values; of nibbles, those of values
// 0 to 15 are the lower halves of 16 bytes, those of values 16 to 31 the upper halves.
#include "quantized_layout.h"

namespace hs {
namespace {

struct Q8_0Block {
  uint16_t d;
  uint8_t q[32];
} __attribute__((packed));
struct Q4_0Block {
  uint16_t d;
  uint8_t q[16];
} __attribute__((packed));
struct Q4_1Block {
  uint16_t d, m;
  uint8_t q[16];
} __attribute__((packed));

// Four neighbours along K: what a column of a panel has in one step.
HS_INLINE uint32_t four(const uint8_t* from) {
  uint32_t out;
  std::memcpy(&out, from, 4);
  return out;
}
HS_INLINE void put(uint8_t* q, int step, int column, uint32_t value) { std::memcpy(q + step * kStepBytes + column * 4, &value, 4); }

// Signed bytes, which get 128 added.
HS_INLINE void put_bytes(uint8_t* q, int column, const uint8_t* values) {
  for (int step = 0; step < kSteps; ++step) put(q, step, column, four(values + 4 * step) ^ 0x80808080u);
}

// From halves that are 16 values apart to halves that are 4 steps apart, which is the same.
HS_INLINE void put_nibbles(uint8_t* q, int column, const uint8_t* values) {
  for (int step = 0; step < kSteps / 2; ++step) put(q, step, column, four(values + 4 * step));
}

HS_INLINE void put_group(Q8_0Group* to, int column, const Q8_0Block& from) {
  to->d[column] = from.d;
  put_bytes(to->q, column, from.q);
}
HS_INLINE void put_group(Q4_0Group* to, int column, const Q4_0Block& from) {
  to->d[column] = from.d;
  put_nibbles(to->q, column, from.q);
}
HS_INLINE void put_group(Q4_1Group* to, int column, const Q4_1Block& from) {
  to->d[column] = from.d;
  to->m[column] = from.m;
  put_nibbles(to->q, column, from.q);
}
struct Int8Block {
  uint8_t q[32];
};
HS_INLINE void put_group(Int8Group* to, int column, const Int8Block& from) { put_bytes(to->q, column, from.q); }

// Columns past n stay zero: their scales are, and what is computed for them is not stored.
template <typename Block, typename Group>
void pack(const void* blocks, int64_t n, int64_t k, void* packed) {
  const int64_t num_groups = k / kGroup;
  std::memset(packed, 0, size_t(num_panels(n) * num_groups) * sizeof(Group));
  for (int64_t row = 0; row < n; ++row) {
    const Block* from = static_cast<const Block*>(blocks) + row * num_groups;
    Group* to = static_cast<Group*>(packed) + row / kPanelColumns * num_groups;
    for (int64_t g = 0; g < num_groups; ++g) put_group(to + g, int(row % kPanelColumns), from[g]);
  }
}

HS_INLINE float half_to_float(uint16_t value) {
  uint16_t lanes[kLanes] = {value};
  alignas(64) float out[kLanes];
  store(out, load_f16(lanes));
  return out[0];
}

HS_INLINE float byte_at(const uint8_t* q, int i, int column) { return float(int(q[byte_index(i, column)]) - 128); }
HS_INLINE float nibble_at(const uint8_t* q, int i, int column) {
  return float(i < 16 ? q[byte_index(i, column)] & 15 : q[byte_index(i - 16, column)] >> 4);
}

// values[i] = d * (q[i] + offset) + m for the 32 values of a column.
HS_INLINE void values_of(const Int8Group& w, int column, float scale, float* values) {
  for (int i = 0; i < kGroup; ++i) values[i] = byte_at(w.q, i, column) * scale;
}
HS_INLINE void values_of(const Q8_0Group& w, int column, float, float* values) {
  const float d = half_to_float(w.d[column]);
  for (int i = 0; i < kGroup; ++i) values[i] = byte_at(w.q, i, column) * d;
}
HS_INLINE void values_of(const Q4_0Group& w, int column, float, float* values) {
  const float d = half_to_float(w.d[column]);
  for (int i = 0; i < kGroup; ++i) values[i] = (nibble_at(w.q, i, column) - 8.0f) * d;
}
HS_INLINE void values_of(const Q4_1Group& w, int column, float, float* values) {
  const float d = half_to_float(w.d[column]), m = half_to_float(w.m[column]);
  for (int i = 0; i < kGroup; ++i) values[i] = nibble_at(w.q, i, column) * d + m;
}

template <typename Group, typename T>
void dequantize(const HsWeight& part, int64_t row, T* out) {
  const int64_t num_groups = part.k / kGroup;
  const Group* w = static_cast<const Group*>(part.data) + row / kPanelColumns * num_groups;
  const float scale = part.scales ? part.scales[row] : 1.0f;
  for (int64_t g = 0; g < num_groups; ++g, out += kGroup) {
    alignas(64) float values[kGroup];
    values_of(w[g], int(row % kPanelColumns), scale, values);
    store(out, load(values));
    store(out + kLanes, load(values + kLanes));
  }
}

template <typename T>
void dequantize_any(const HsWeight& part, int64_t row, T* out) {
  switch (part.format) {
    case kInt8: return dequantize<Int8Group>(part, row, out);
    case kQ8_0: return dequantize<Q8_0Group>(part, row, out);
    case kQ4_0: return dequantize<Q4_0Group>(part, row, out);
    case kQ4_1: return dequantize<Q4_1Group>(part, row, out);
  }
}

}  // namespace

void dequantize_row(const HsWeight& part, int64_t row, float* out) { dequantize_any(part, row, out); }
void dequantize_row(const HsWeight& part, int64_t row, bf16* out) { dequantize_any(part, row, out); }

}  // namespace hs

// [n, k] signed bytes, or [n, k / 32] blocks, to num_panels(n) panels.
HS_EXPORT void hs_pack_int8(const void* weight, int64_t n, int64_t k, void* packed) {
  hs::pack<hs::Int8Block, hs::Int8Group>(weight, n, k, packed);
}
HS_EXPORT void hs_pack_q8_0(const void* blocks, int64_t n, int64_t k, void* packed) {
  hs::pack<hs::Q8_0Block, hs::Q8_0Group>(blocks, n, k, packed);
}
HS_EXPORT void hs_pack_q4_0(const void* blocks, int64_t n, int64_t k, void* packed) {
  hs::pack<hs::Q4_0Block, hs::Q4_0Group>(blocks, n, k, packed);
}
HS_EXPORT void hs_pack_q4_1(const void* blocks, int64_t n, int64_t k, void* packed) {
  hs::pack<hs::Q4_1Block, hs::Q4_1Group>(blocks, n, k, packed);
}
