// The thread that serves a mailbox: it looks for a job, takes a copy of it, checks every number in
// it, computes, answers. Where the fields are: kernels/mailbox.py.

#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "compute.h"

namespace moestro {

struct Fields {
    int32_t *header, *answer;
    int64_t *stats, *address;
    int32_t *lo, *route;
    char *x, *z;
};

struct Limits {
    int64_t rows, top_k, experts;
    std::vector<std::pair<int64_t, int64_t>> memory;  // (address, bytes) of where blobs may be
    int64_t blob;                                     // bytes of one, from its start to its end
};

class Worker {
  public:
    Worker(const Fields& fields, const Limits& limits, Compute& compute, std::mutex& turn, int core,
           void (*count)(void*, int64_t, int64_t), void* counter)
        : at_(fields), limits_(limits), compute_(compute), turn_(turn), core_(core), count_(count),
          counter_(counter), address_(limits.experts), lo_(limits.experts + 1),
          route_(limits.rows * limits.top_k), row_(limits.rows * limits.top_k),
          thread_([this] { serve(); }) {}

    ~Worker() {
        {
            std::lock_guard<std::mutex> hold(sleep_);
            over_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    void pause() {
        std::unique_lock<std::mutex> hold(sleep_);
        paused_ = true;
        changed_.wait(hold, [this] { return asleep_ || over_ || !paused_; });
    }

    void resume() {
        {
            std::lock_guard<std::mutex> hold(sleep_);
            paused_ = false;
        }
        changed_.notify_all();
    }

  private:
    static constexpr int POSTED = 0, ROWS = 2, EXPERTS = 3, ROUTES = 4, DONE = 0, ERROR = 1, SPENT = 2;
    static constexpr int BUSY = 0, BYTES = 1, JOBS = 2, BEAT = 3;
    static constexpr int64_t BEAT_NS = 500'000, IDLE_NS = 20'000'000;

    int32_t posted() const { return __atomic_load_n(at_.header + POSTED, __ATOMIC_ACQUIRE); }
    void tell(int which, int64_t value) {
        __atomic_store_n(at_.stats + which, value, __ATOMIC_RELAXED);
    }

    void serve() {
        if (core_ >= 0) pin_this_thread(core_);
        int32_t last = at_.answer[DONE];
        int64_t idle = now_ns();
        while (!over_.load(std::memory_order_relaxed)) {
            if (paused_.load(std::memory_order_relaxed)) {
                rest();
                continue;
            }
            tell(BEAT, now_ns());
            const int64_t until = now_ns() + (now_ns() - idle > IDLE_NS ? 0 : BEAT_NS);
            while (posted() == last && now_ns() < until)
                for (int i = 0; i < 16 && posted() == last; i++) relax();
            if (const int32_t number = posted(); number != last) {
                last = work(number);
                idle = now_ns();
            } else if (now_ns() - idle > IDLE_NS) {  // nobody decodes: leave the core to others
                std::this_thread::sleep_for(std::chrono::microseconds(50));
            }
        }
    }

    void rest() {
        std::unique_lock<std::mutex> hold(sleep_);
        asleep_ = true;
        changed_.notify_all();
        changed_.wait(hold, [this] { return over_ || !paused_; });
        asleep_ = false;
    }

    // Serves the job with this number or a newer one; returns the last number it looked at.
    int32_t work(int32_t number) {
        const int64_t began = now_ns();
        std::lock_guard<std::mutex> mine(turn_);
        Job job{};
        int error = take(job);
        for (int32_t newer; (newer = posted()) != number; number = newer) error = take(job);
        job.posted = at_.header + POSTED;
        job.number = number;
        if (!error && !compute_.run(job)) return number;
        const int64_t bytes = error ? 0 : job.experts * compute_.nbytes(), spent = now_ns() - began;
        tell(BUSY, at_.stats[BUSY] + spent);
        tell(BYTES, at_.stats[BYTES] + bytes);
        tell(JOBS, at_.stats[JOBS] + 1);
        count_(counter_, bytes, spent);
        __atomic_store_n(at_.answer + ERROR, error, __ATOMIC_RELAXED);
        const int32_t brief = int32_t(std::min<int64_t>(spent, INT32_MAX));
        __atomic_store_n(at_.answer + SPENT, brief, __ATOMIC_RELAXED);
        __atomic_store_n(at_.answer + DONE, number, __ATOMIC_RELEASE);
        return number;
    }

    // Copies the job and checks it, since it may change under our hands. An error code, or 0.
    int take(Job& job) {
        const int64_t rows = at_.header[ROWS], experts = at_.header[EXPERTS],
                      routes = at_.header[ROUTES];
        if (rows < 0 || rows > limits_.rows) return 1;
        if (experts < 0 || experts > limits_.experts) return 2;
        if (routes < 0 || routes > rows * limits_.top_k) return 3;
        if (experts == 0) {
            lo_[0] = 0;
        } else {
            std::memcpy(address_.data(), at_.address, experts * sizeof(int64_t));
            std::memcpy(lo_.data(), at_.lo, (experts + 1) * sizeof(int32_t));
            std::memcpy(route_.data(), at_.route, routes * sizeof(int32_t));
            if (lo_[0] != 0 || lo_[experts] != routes) return 4;
        }
        for (int64_t e = 0; e < experts; e++) {
            if (lo_[e] > lo_[e + 1]) return 4;
            if (!known(address_[e])) return 6;
        }
        for (int64_t j = 0; j < lo_[experts]; j++) {
            if (route_[j] < 0 || route_[j] >= rows * limits_.top_k) return 5;
            row_[j] = int32_t(route_[j] / limits_.top_k);
        }
        job = {experts, address_.data(), lo_.data(), row_.data(), route_.data(), at_.x, rows, at_.z};
        return 0;
    }

    bool known(int64_t address) const {
        if (limits_.memory.empty()) return address != 0;
        for (const auto& [start, bytes] : limits_.memory)
            if (address >= start && address - start <= bytes - limits_.blob) return true;
        return false;
    }

    Fields at_;
    Limits limits_;
    Compute& compute_;
    std::mutex& turn_;
    int core_;
    void (*count_)(void*, int64_t, int64_t);
    void* counter_;
    std::vector<int64_t> address_;
    std::vector<int32_t> lo_, route_, row_;
    std::atomic<bool> over_{false}, paused_{false};
    bool asleep_ = false;
    std::mutex sleep_;
    std::condition_variable changed_;
    std::thread thread_;  // last: it uses all others
};

}  // namespace moestro
