// Some experts on some tokens, by all lanes of a pool. Three phases, each cut into units that lanes
// take as they come: activations made ready, gate and up, down. Every output is one lane's work in
// an order of its own, so results do not depend on threads or on what else is in the job.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "experts.h"
#include "pool.h"

namespace moestro {

struct Shape {
    int64_t hidden, inner, down;  // down: bytes from the start of a blob
    Kind weights, x;
};

// z[target[j]] = expert e of x[source[j]], lo[e] <= j < lo[e + 1].
struct Job {
    int64_t experts;
    const int64_t* address;
    const int32_t *lo, *source, *target;
    const char* x;
    int64_t rows;  // of x
    char* z;
    const int32_t* posted = nullptr;  // the job is given up when this is no longer `number`
    int32_t number = 0;
};

// Memory on a cache line that only grows.
class Scratch {
  public:
    char* at_least(size_t bytes) {
        if (bytes > size_) {
            size_ = std::max(bytes, size_ + size_ / 2);
            size_ = (size_ + 4095) / 4096 * 4096;
            memory_.reset(static_cast<char*>(std::aligned_alloc(4096, size_)));
            if (!memory_) throw std::bad_alloc();
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    size_t size_ = 0;
};

class Compute {
  public:
    Compute(const Shape& shape, const Variant& variant, Pool& pool)
        : shape_(shape), variant_(variant), pool_(pool) {}

    // Bytes of weights of one expert.
    int64_t nbytes() const { return 3 * shape_.hidden * shape_.inner * ELEMENT[shape_.weights]; }

    // False when it was given up. One caller at a time.
    bool run(const Job& job) {
        if (job.lo[job.experts] == 0) return true;
        pool_.settle();
        plan(job);
        if (pool_.lanes() == 1 || job.experts * nbytes() < ALONE)
            lane(0);
        else
            pool_.run([](void* self, int lane) { static_cast<Compute*>(self)->lane(lane); }, this);
        return !given_up_.load();
    }

  private:
    static constexpr int64_t ALONE = 64 << 10;   // bytes of weights not worth waking others for
    static constexpr int64_t UNITS = 16;         // units a lane, about
    static constexpr int64_t LEAST = 16 << 10;   // bytes of a unit
    static constexpr int64_t MOST = 128 << 10;
    static constexpr int64_t TILES_FROM = 8;     // tokens of an expert

    struct Phase {
        alignas(64) std::atomic<int64_t> next{0};
        alignas(64) std::atomic<int64_t> done{0};
        int64_t units = 0;

        void reset(int64_t count) {
            units = count;
            next.store(0, std::memory_order_relaxed);
            done.store(0, std::memory_order_relaxed);
        }
    };

    // One expert in the job.
    struct Share {
        const char* blob;
        int64_t first, tokens;   // its j
        int64_t place;           // of its intermediate values, in tokens
        int64_t panel;           // of its activations, in tokens; -1: it has no panels
        int64_t ready, gated, plain;              // its first unit in each phase
        int64_t gated_rows, plain_rows;           // of a unit
    };

    int64_t value_bytes() const { return variant_.wide ? 4 : ELEMENT[shape_.x]; }
    int64_t stride(int64_t length) const { return length * ELEMENT[shape_.weights]; }

    static int64_t up_to(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

    void plan(const Job& job) {
        job_ = job;
        given_up_.store(false);
        const int64_t unit = std::clamp(job.experts * nbytes() / (pool_.lanes() * UNITS), LEAST, MOST);
        const int64_t gated = unit / (2 * stride(shape_.hidden)), plain = unit / stride(shape_.inner);
        shares_.clear();
        int64_t place = 0, panel = 0, units[3] = {};
        widened_ = variant_.wide && shape_.x != F32;
        if (widened_) units[0] = (job.rows + TILE - 1) / TILE;
        for (int64_t e = 0; e < job.experts; e++) {
            Share share{};
            share.blob = reinterpret_cast<const char*>(job.address[e]);
            share.first = job.lo[e];
            share.tokens = job.lo[e + 1] - job.lo[e];
            if (share.tokens == 0) continue;
            const bool tiles = variant_.gated_tiles && share.tokens >= TILES_FROM;
            share.place = place;
            share.panel = tiles ? panel : -1;
            share.gated_rows = up_to(std::max<int64_t>(gated, 1), tiles ? TILE : 4);
            share.plain_rows = up_to(std::max<int64_t>(plain, 1), tiles ? 2 * TILE : 8);
            share.ready = units[0];
            share.gated = units[1];
            share.plain = units[2];
            const int64_t padded = up_to(share.tokens, TILE);
            place += padded;
            if (tiles) {
                panel += padded;
                units[0] += padded / TILE;
            }
            units[1] += (shape_.inner + share.gated_rows - 1) / share.gated_rows;
            units[2] += (shape_.hidden + share.plain_rows - 1) / share.plain_rows;
            shares_.push_back(share);
        }
        if (widened_) wide_ = wide_memory_.at_least(job.rows * shape_.hidden * sizeof(float));
        inner_ = inner_memory_.at_least(place * shape_.inner * value_bytes());
        if (panel) panels_ = panel_memory_.at_least(panel * shape_.hidden * 2);
        for (int i = 0; i < 3; i++) phases_[i].reset(units[i]);
    }

    void lane(int lane) {
        each(lane, phases_[0], [this](int64_t unit, int64_t) { make_ready(unit); });
        each(lane, phases_[1], [this](int64_t unit, int64_t next) { gate_and_up(unit, next); });
        each(lane, phases_[2], [this](int64_t unit, int64_t next) { down(unit, next); });
    }

    // Units until there are none left, then until all are done. The next one is taken before this
    // one is begun, so that its weights can be asked for.
    template <class Do>
    void each(int lane, Phase& phase, Do one) {
        if (phase.units == 0) return;
        int64_t done = 0, unit = phase.next.fetch_add(1);
        while (unit < phase.units && !given_up_.load(std::memory_order_relaxed)) {
            const int64_t next = phase.next.fetch_add(1);
            one(unit, next < phase.units ? next : -1);
            unit = next;
            done++;
            if (lane == 0 && job_.posted &&
                __atomic_load_n(job_.posted, __ATOMIC_RELAXED) != job_.number)
                given_up_.store(true);
        }
        phase.done.fetch_add(done);
        Patience patience;
        while (phase.done.load() < phase.units && !given_up_.load(std::memory_order_relaxed))
            patience.wait();
    }

    // The share that has this unit of a phase.
    const Share& share(int64_t unit, int64_t Share::*first) const {
        const auto after = std::upper_bound(
            shares_.begin(), shares_.end(), unit,
            [first](int64_t wanted, const Share& one) { return wanted < one.*first; });
        return *(after - 1);
    }

    void make_ready(int64_t unit) {
        const int64_t width = shape_.hidden;
        if (widened_) {
            const int64_t lo = unit * TILE, count = std::min(TILE, job_.rows - lo);
            variant_.widen(job_.x + lo * width * ELEMENT[shape_.x], count * width,
                           reinterpret_cast<float*>(wide_) + lo * width);
            return;
        }
        const Share& mine = share(unit, &Share::ready);  // the last one: it has panels
        pack(mine, (unit - mine.ready) * TILE);
    }

    // TILE tokens of a share from `token` on, side by side, as pairs of bfloat16.
    void pack(const Share& mine, int64_t token) {
        const int64_t pairs = shape_.hidden / 2;
        uint32_t* out = reinterpret_cast<uint32_t*>(panels_) + (mine.panel + token) * pairs;
        const uint32_t* rows[TILE];
        const int64_t count = std::min(TILE, mine.tokens - token);
        for (int64_t t = 0; t < count; t++)
            rows[t] = reinterpret_cast<const uint32_t*>(job_.x) +
                      job_.source[mine.first + token + t] * pairs;
        for (int64_t p = 0; p < pairs; p++) {
            for (int64_t t = 0; t < count; t++) out[p * TILE + t] = rows[t][p];
            for (int64_t t = count; t < TILE; t++) out[p * TILE + t] = 0;
        }
    }

    void gate_and_up(int64_t unit, int64_t next) {
        const Share& mine = share(unit, &Share::gated);
        const int64_t bytes = stride(shape_.hidden);
        const auto start = [&](const Share& one, int64_t at) {
            return one.blob + (at - one.gated) * one.gated_rows * bytes;
        };
        Run run{};
        run.first = (unit - mine.gated) * mine.gated_rows;
        run.weights = start(mine, unit);
        run.second = run.weights + shape_.inner * bytes;
        run.rows = std::min(mine.gated_rows, shape_.inner - run.first);
        run.length = shape_.hidden;
        run.width = shape_.inner;
        if (next >= 0) run.ahead = start(share(next, &Share::gated), next) - run.weights;
        const bool tiles = mine.panel >= 0;
        slabs(mine, run, tiles ? variant_.gated_tiles : variant_.gated,
              [&](int64_t token, const char** x, char** out) {
                  char* place = inner_ + (mine.place + token) * shape_.inner * value_bytes();
                  run.panel = place;
                  if (tiles) {
                      x[0] = panels_ + (mine.panel + token) * shape_.hidden * 2;
                      return;
                  }
                  for (int64_t t = 0; t < run.tokens; t++) {
                      x[t] = activations(job_.source[mine.first + token + t]);
                      out[t] = place + (t * shape_.inner + run.first) * value_bytes();
                  }
              });
    }

    void down(int64_t unit, int64_t next) {
        const Share& mine = share(unit, &Share::plain);
        const int64_t bytes = stride(shape_.inner);
        const auto start = [&](const Share& one, int64_t at) {
            return one.blob + shape_.down + (at - one.plain) * one.plain_rows * bytes;
        };
        Run run{};
        run.first = (unit - mine.plain) * mine.plain_rows;
        run.weights = start(mine, unit);
        run.rows = std::min(mine.plain_rows, shape_.hidden - run.first);
        run.length = shape_.inner;
        if (next >= 0) run.ahead = start(share(next, &Share::plain), next) - run.weights;
        slabs(mine, run, mine.panel >= 0 ? variant_.plain_tiles : variant_.plain,
              [&](int64_t token, const char** x, char** out) {
                  for (int64_t t = 0; t < run.tokens; t++) {
                      x[t] = inner_ + (mine.place + token + t) * shape_.inner * value_bytes();
                      out[t] = job_.z + (job_.target[mine.first + token + t] * shape_.hidden +
                                         run.first) * ELEMENT[shape_.x];
                  }
              });
    }

    // The kernel on all tokens of a share, as many at a time as it takes. The weights of the run
    // are in the cache after the first time.
    template <class Fill>
    static void slabs(const Share& mine, Run& run, Kernel kernel, Fill fill) {
        const char* x[SLAB];
        char* out[SLAB];
        for (int64_t token = 0; token < mine.tokens; token += SLAB) {
            run.tokens = std::min(SLAB, mine.tokens - token);
            fill(token, x, out);
            kernel(run, x, out);
            run.ahead = 0;
        }
    }

    const char* activations(int64_t row) const {
        if (widened_) return wide_ + row * shape_.hidden * sizeof(float);
        return job_.x + row * shape_.hidden * ELEMENT[shape_.x];
    }

    Shape shape_;
    Variant variant_;
    Pool& pool_;
    Job job_{};
    std::vector<Share> shares_;
    Phase phases_[3];
    std::atomic<bool> given_up_{false};
    bool widened_ = false;
    char *wide_ = nullptr, *inner_ = nullptr, *panels_ = nullptr;
    Scratch wide_memory_, inner_memory_, panel_memory_;
};

}  // namespace moestro
