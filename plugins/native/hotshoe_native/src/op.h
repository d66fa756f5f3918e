// What an operation is to the rest of the library: a function that every thread of a team runs on the same arguments.
//
// An op splits its work by (thread, num_threads); where a thread reads what another wrote, a team.barrier() lies between. Between two
// ops of a list there is a barrier too, so a whole forward pass is a list of ops that one parallel region runs (see run.cpp), and a
// single call is a list of one. Ops keep no state: buffers come with the arguments, so several engines may live in one process.
//
// hs_<name>(args, num_threads) runs an op now; the address of hs_op_<name> is what a recorded list holds. Python fills the argument
// structs and validates them; nothing is checked here. They hold pointers, 64-bit integers, and floats at the end.
#pragma once

#include <cstdint>

#define HS_EXPORT extern "C" __attribute__((visibility("default")))

namespace hs {

enum DType : int64_t { kF32 = 0, kBF16 = 1, kI8 = 2 };

class Barrier;

// What a thread of a running op knows about the others.
struct Team {
  int64_t thread;
  int64_t num_threads;
  Barrier* meeting;  // null if there is one thread

  // All threads have come this far, and see what the others wrote.
  void barrier() const;
};

using OpFunction = void (*)(const void* args, const Team& team);

struct Op {
  OpFunction run;
  const void* args;
};

// Rows or blocks [begin, end) of `count` that a thread owns: contiguous, sizes differ by at most one.
struct Range {
  int64_t begin, end;
};
inline Range share(int64_t count, const Team& team) {
  return {count * team.thread / team.num_threads, count * (team.thread + 1) / team.num_threads};
}

// Run `count` ops one after another; returns when the last one is done.
void run(const Op* ops, int64_t count, int64_t num_threads);

}  // namespace hs

// Defines the two entry points of an op whose work is body(const Args&, const hs::Team&).
#define HS_DEFINE_OP(name, Args, body)                                     \
  HS_EXPORT void hs_op_##name(const void* args, const hs::Team& team) {    \
    body(*static_cast<const Args*>(args), team);                           \
  }                                                                        \
  HS_EXPORT void hs_##name(const Args* args, int64_t num_threads) {        \
    const hs::Op op{hs_op_##name, args};                                   \
    hs::run(&op, 1, num_threads);                                          \
  }
