// Runs a kernel's GPU code on a CPU, one team of 16 threads at a time.
//
// Threads are coroutines that take turns wherever a team synchronises. So results do not depend on
// a GPU, and a missing synchronisation shows: what a later thread should have written is not there.
// -DNAME=name -DKERNEL_FILE="name.cu" -DREVERSED=0 or 1, which says who goes first.
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define __CUDACC__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static

struct Index {
    unsigned x;
};
static Index threadIdx, blockIdx;
static const Index blockDim = {128};

static const int kThreads = 16;
static ucontext_t threads[kThreads], scheduler;
static int current;

// Let every other thread of the team come to this point.
static void take_turns() {
    int self = current;
    Index own = threadIdx;
    swapcontext(&threads[self], &scheduler);
    threadIdx = own;
}

static inline void __syncwarp(unsigned) { take_turns(); }

template <class T>
static inline T __shfl_xor_sync(unsigned, T value, int distance, int) {
    static T given[kThreads];
    int lane = threadIdx.x & 15;
    given[lane] = value;
    take_turns();
    T received = given[lane ^ distance];
    take_turns();
    return received;
}

static inline int __float_as_int(float x) {
    int r;
    memcpy(&r, &x, 4);
    return r;
}

static inline double __longlong_as_double(long long x) {
    double r;
    memcpy(&r, &x, 8);
    return r;
}

static inline float __int_as_float(int x) {
    float r;
    memcpy(&r, &x, 4);
    return r;
}

#include KERNEL_FILE

static std::function<void()> body;
static bool ended[kThreads];

static void begin(int lane, unsigned first_thread) {
    threadIdx.x = first_thread + lane;
    body();
    ended[lane] = true;
    swapcontext(&threads[lane], &scheduler);
}

static void run_team(unsigned first_thread) {
    static std::vector<char> stacks[kThreads];
    for (int lane = 0; lane < kThreads; ++lane) {
        stacks[lane].resize(1 << 18);
        ended[lane] = false;
        getcontext(&threads[lane]);
        threads[lane].uc_stack.ss_sp = stacks[lane].data();
        threads[lane].uc_stack.ss_size = stacks[lane].size();
        makecontext(&threads[lane], (void (*)())begin, 2, lane, first_thread);
    }
    for (bool running = true; running;) {
        running = false;
        for (int turn = 0; turn < kThreads; ++turn) {
            current = REVERSED ? kThreads - 1 - turn : turn;
            if (ended[current]) continue;
            swapcontext(&scheduler, &threads[current]);
            running = true;
        }
    }
}

extern "C" void emulate(const Arguments* arguments, int64_t first, int64_t last) {
    body = [=] { NAME(*arguments, first, last); };
    for (int64_t team = 0; team < last - first; ++team) {
        blockIdx.x = team / 8;
        run_team(team % 8 * 16);
    }
}
