// The small ops between matrix products: values are read once, computed in float32, rounded once.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "op.h"
#include "simd.h"

namespace hs {
namespace {

// Calls body(Value()) with the type that a DType stands for.
template <typename Body>
void with_type(int64_t dtype, Body body) {
  if (dtype == kF32) {
    body(float());
  } else {
    body(bf16());
  }
}

// Calls body(begin, load, store) for every 16 values of `count`, the last of which may be fewer.
template <typename Body>
HS_INLINE void each_vector(int64_t count, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    body(i, [](const auto* from) { return load(from); }, [](auto* to, f32x16 value) { store(to, value); });
  }
  if (const int rest = int(count - i)) {
    body(i, [=](const auto* from) { return load_some(from, rest); }, [=](auto* to, f32x16 value) { store_some(to, value, rest); });
  }
}

// Calls body(row, begin, count) for each stretch of a row that this thread owns: threads share single rows too.
template <typename Body>
void each_stretch(int64_t num_rows, int64_t size, const Team& team, Body body) {
  constexpr int64_t kLength = 256;
  const int64_t per_row = (size + kLength - 1) / kLength;
  const Range stretches = share(num_rows * per_row, team);
  for (int64_t i = stretches.begin; i < stretches.end; ++i) {
    const int64_t begin = i % per_row * kLength;
    body(i / per_row, begin, std::min(kLength, size - begin));
  }
}

struct RmsNormArgs {
  const void* x;  // [num_rows, num_heads, size]
  int64_t x_stride, x_head_stride;
  void* residual;  // likewise; becomes residual + x; null: there is none
  int64_t residual_stride, residual_head_stride;
  void* out;           // likewise, contiguous
  const void* weight;  // [size]
  int64_t num_rows, num_heads;
  int64_t size;
  int64_t dtype;  // of everything
  double eps;
};

template <typename T>
void rms_norm_row(const T* x, T* residual, T* out, const T* weight, int64_t size, float eps) {
  const int64_t in_pairs = size / 32 * 32;
  f32x16 squares[2] = {zero(), zero()};
  for (int64_t i = 0; i < in_pairs; i += 32) {
    f32x32 values = load_32(x + i);
    if (residual) {
      const f32x32 before = load_32(residual + i);
      for (int h = 0; h < 2; ++h) values.half[h] = before.half[h] + values.half[h];
      values = store_32(residual + i, values);  // what is normed is the rounded sum
    }
    for (int h = 0; h < 2; ++h) squares[h] = fma(values.half[h], values.half[h], squares[h]);
  }
  each_vector(size - in_pairs, [&](int64_t i, auto load_at, auto store_at) {
    f32x16 value = load_at(x + in_pairs + i);
    if (residual) {
      T* to = residual + in_pairs + i;
      store_at(to, load_at(to) + value);
      value = load_at(to);
    }
    squares[0] = fma(value, value, squares[0]);
  });
  const f32x16 scale = set1(1 / std::sqrt(sum(squares[0] + squares[1]) / float(size) + eps));
  const T* from = residual ? residual : x;
  for (int64_t i = 0; i < in_pairs; i += 32) {
    f32x32 values = load_32(from + i);
    const f32x32 weights = load_32(weight + i);
    for (int h = 0; h < 2; ++h) values.half[h] = values.half[h] * scale * weights.half[h];
    store_32(out + i, values);
  }
  each_vector(size - in_pairs, [&](int64_t i, auto load_at, auto store_at) {
    store_at(out + in_pairs + i, load_at(from + in_pairs + i) * scale * load_at(weight + in_pairs + i));
  });
}

void rms_norm(const RmsNormArgs& args, const Team& team) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const Range heads = share(args.num_rows * args.num_heads, team);
    for (int64_t i = heads.begin; i < heads.end; ++i) {
      const int64_t row = i / args.num_heads, head = i % args.num_heads;
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride + head * args.x_head_stride;
      T* residual = static_cast<T*>(args.residual);
      if (residual) residual += row * args.residual_stride + head * args.residual_head_stride;
      rms_norm_row(x, residual, static_cast<T*>(args.out) + i * args.size, static_cast<const T*>(args.weight), args.size,
                   float(args.eps));
    }
  });
}

struct SiluAndMulArgs {
  const void* x;  // rows of size gates, then size factors
  int64_t x_stride;
  void* out;  // contiguous
  int64_t num_rows;
  int64_t size;
  int64_t dtype;
};

void silu_and_mul(const SiluAndMulArgs& args, const Team& team) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    each_stretch(args.num_rows, args.size, team, [&](int64_t row, int64_t begin, int64_t count) {
      const T* gate = static_cast<const T*>(args.x) + row * args.x_stride + begin;
      const T* up = gate + args.size;
      T* out = static_cast<T*>(args.out) + row * args.size + begin;
      each_vector(count, [&](int64_t i, auto load_at, auto store_at) { store_at(out + i, silu_of(load_at(gate + i)) * load_at(up + i)); });
    });
  });
}

struct SiluArgs {
  const void* x;
  int64_t x_stride;
  void* out;  // contiguous
  int64_t num_rows;
  int64_t size;
  int64_t dtype;
};

void silu(const SiluArgs& args, const Team& team) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    each_stretch(args.num_rows, args.size, team, [&](int64_t row, int64_t begin, int64_t count) {
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride + begin;
      T* out = static_cast<T*>(args.out) + row * args.size + begin;
      each_vector(count, [&](int64_t i, auto load_at, auto store_at) { store_at(out + i, silu_of(load_at(x + i))); });
    });
  });
}

struct AddArgs {
  const void* x;
  int64_t x_stride;
  const void* y;
  int64_t y_stride;
  void* out;  // contiguous
  int64_t num_rows;
  int64_t size;
  int64_t dtype;
};

void add(const AddArgs& args, const Team& team) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    each_stretch(args.num_rows, args.size, team, [&](int64_t row, int64_t begin, int64_t count) {
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride + begin;
      const T* y = static_cast<const T*>(args.y) + row * args.y_stride + begin;
      T* out = static_cast<T*>(args.out) + row * args.size + begin;
      each_vector(count, [&](int64_t i, auto load_at, auto store_at) { store_at(out + i, load_at(x + i) + load_at(y + i)); });
    });
  });
}

// Rows of any type, or parts of rows, to another place.
struct CopyRowsArgs {
  const void* x;
  int64_t x_stride;     // in bytes, as all sizes here
  int64_t x_num_rows;
  const int64_t* rows;  // [num_rows], which rows of x; null: all of them
  void* out;
  int64_t out_stride;
  int64_t num_rows;
  int64_t row_bytes;
};

void copy_rows(const CopyRowsArgs& args, const Team& team) {
  const Range mine = share(args.num_rows, team);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    char* out = static_cast<char*>(args.out) + i * args.out_stride;
    const int64_t row = args.rows ? args.rows[i] : i;
    if (row < 0 || row >= args.x_num_rows) {
      std::memset(out, 0xff, args.row_bytes);  // there is no such row: not a number, or -1, which nobody can mistake for a result
    } else {
      std::memcpy(out, static_cast<const char*>(args.x) + row * args.x_stride, args.row_bytes);
    }
  }
}

struct RopeArgs {
  void* q;  // [num_tokens, num_heads, at least 2 * half]
  int64_t q_token_stride, q_head_stride;
  void* k;
  int64_t k_token_stride, k_head_stride;
  int64_t num_tokens;
  int64_t num_heads, num_kv_heads;
  int64_t half;  // of the rotated dimensions
  const int64_t* positions;
  const float* cos;  // [max_positions, half]
  const float* sin;
  int64_t table_stride;
  int64_t dtype;
};

template <typename T>
void rotate(T* head, const float* cos, const float* sin, int64_t half) {
  each_vector(half, [&](int64_t i, auto load_at, auto store_at) {
    const f32x16 first = load_at(head + i), second = load_at(head + half + i);
    const f32x16 c = load_at(cos + i), s = load_at(sin + i);
    store_at(head + i, first * c - second * s);
    store_at(head + half + i, second * c + first * s);
  });
}

void rope(const RopeArgs& args, const Team& team) {
  with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const Range tokens = share(args.num_tokens, team);
    for (int64_t i = tokens.begin; i < tokens.end; ++i) {
      const float* cos = args.cos + args.positions[i] * args.table_stride;
      const float* sin = args.sin + args.positions[i] * args.table_stride;
      T* q = static_cast<T*>(args.q) + i * args.q_token_stride;
      T* k = static_cast<T*>(args.k) + i * args.k_token_stride;
      for (int64_t h = 0; h < args.num_heads; ++h) rotate(q + h * args.q_head_stride, cos, sin, args.half);
      for (int64_t h = 0; h < args.num_kv_heads; ++h) rotate(k + h * args.k_head_stride, cos, sin, args.half);
    }
  });
}

}  // namespace

HS_DEFINE_OP(rms_norm, RmsNormArgs, rms_norm)
HS_DEFINE_OP(silu_and_mul, SiluAndMulArgs, silu_and_mul)
HS_DEFINE_OP(silu, SiluArgs, silu)
HS_DEFINE_OP(add, AddArgs, add)
HS_DEFINE_OP(copy_rows, CopyRowsArgs, copy_rows)
HS_DEFINE_OP(rope, RopeArgs, rope)

}  // namespace hs
