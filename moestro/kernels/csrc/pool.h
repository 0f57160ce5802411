// Threads that wait for work together. Whoever brings work does it as lane 0; the others join when
// they see it. Nobody waits for a lane that has not begun: the work itself says when it is done.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace moestro {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

inline int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

inline void pin_this_thread(int core) {
#if defined(__linux__)
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    pthread_setaffinity_np(pthread_self(), sizeof(only), &only);
#endif
}

// Waits for something short: others that want the core get it after a while.
class Patience {
  public:
    void wait() {
        if (++looked_ % 4096)
            relax();
        else
            std::this_thread::yield();
    }

  private:
    int64_t looked_ = 0;
};

class Pool {
  public:
    using Work = void (*)(void* what, int lane);

    Pool(int threads, std::vector<int> cores, int64_t spin_us)
        : cores_(std::move(cores)), spin_ns_(spin_us * 1000) {
        for (int lane = 1; lane < threads; lane++)
            threads_.emplace_back([this, lane] { serve(lane); });
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> hold(sleep_);
            over_ = true;
        }
        awake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    int lanes() const { return int(threads_.size()) + 1; }

    // The core of a lane, or -1 when it is not pinned.
    int core(int lane) const { return cores_.empty() ? -1 : cores_[lane % cores_.size()]; }

    // No lane is in the last piece of work any more, so that its data may change. One caller.
    void settle() {
        Patience patience;
        while (inside_.load()) patience.wait();
    }

    // Does work(what, lane) in this thread, as lane 0, and in those that join in time. The caller
    // calls settle before it changes what `what` points to.
    void run(Work work, void* what) {
        work_ = work;
        what_ = what;
        const uint64_t number = ++number_;
        open_.store(number);
        posted_.store(number);
        if (asleep_.load()) {
            std::lock_guard<std::mutex> hold(sleep_);
            awake_.notify_all();
        }
        work(what, 0);
        open_.store(0);
    }

  private:
    void serve(int lane) {
        if (core(lane) >= 0) pin_this_thread(core(lane));
        for (uint64_t seen = 0; (seen = next(seen)) != 0;) {
            inside_.fetch_add(1);
            if (open_.load() == seen) work_(what_, lane);
            inside_.fetch_sub(1);
        }
    }

    // The number of the next piece of work; 0 at the end.
    uint64_t next(uint64_t seen) {
        const int64_t until = now_ns() + spin_ns_;
        do {
            for (int i = 0; i < 64; i++) {
                if (const uint64_t posted = posted_.load(); posted != seen) return posted;
                if (over_.load(std::memory_order_relaxed)) return 0;
                relax();
            }
        } while (now_ns() < until);
        std::unique_lock<std::mutex> hold(sleep_);
        asleep_.fetch_add(1);
        awake_.wait(hold, [&] { return over_ || posted_.load() != seen; });
        asleep_.fetch_sub(1);
        return over_ ? 0 : posted_.load();
    }

    std::vector<int> cores_;
    int64_t spin_ns_;
    uint64_t number_ = 0;
    Work work_ = nullptr;
    void* what_ = nullptr;
    alignas(64) std::atomic<uint64_t> posted_{0};
    std::atomic<uint64_t> open_{0};
    alignas(64) std::atomic<int> inside_{0};
    alignas(64) std::atomic<int> asleep_{0};
    std::atomic<bool> over_{false};
    std::mutex sleep_;
    std::condition_variable awake_;
    std::vector<std::thread> threads_;
};

}  // namespace moestro
