// Where the threads of a step wait for each other.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>

namespace pdd {

// Threads spin for the microseconds that phases differ by. If one of them has lost its core to another process, they
// sleep instead: OpenMP's own barrier spins on, and can keep the very thread it waits for from running.
class Barrier {
  public:
    explicit Barrier(int threads) : threads_(threads) {}

    void wait() {
        const uint32_t round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            round_.notify_all();
            return;
        }
        for (int i = 0; i < kSpins; i++) {
            if (round_.load(std::memory_order_acquire) != round) return;
            _mm_pause();
        }
        round_.wait(round, std::memory_order_acquire);
    }

  private:
    static constexpr int kSpins = 4000;  // some 50 to 150 microseconds
    const int threads_;
    std::atomic<int> arrived_{0};
    std::atomic<uint32_t> round_{0};
};

}  // namespace pdd
