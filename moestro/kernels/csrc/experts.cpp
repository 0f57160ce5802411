// The C interface of the expert kernels. Who may call what, and what arguments mean:
// kernels/cpu_experts.py.

#include <cstring>

#include "worker.h"

namespace {

using namespace moestro;

const Variant* find(const char* name, Kind weights, Kind x, int64_t hidden, int64_t inner) {
    const Variant* all[] = {generic_variant(weights, x), avx2_variant(weights, x),
                            avx512_variant(weights, x), avx512_bf16_variant(weights, x),
                            amx_variant(weights, x)};
    for (const Variant* one : all)
        if (one && std::strcmp(one->name, name) == 0)
            return one->gated_tiles && (hidden % 32 || inner % 32) ? nullptr : one;
    return nullptr;
}

struct Experts {
    Experts(const Shape& given, const Variant& variant, int threads, std::vector<int> cores,
            int64_t spin_us)
        : shape(given), pool(threads, std::move(cores), spin_us), compute(given, variant, pool) {}

    static void count(void* self, int64_t more, int64_t ns) {
        Experts& experts = *static_cast<Experts*>(self);
        experts.jobs += 1;
        experts.bytes += more;
        experts.busy += ns;
    }

    Shape shape;
    std::mutex turn;  // whose job it is: a caller's or the worker's
    std::atomic<int64_t> jobs{0}, bytes{0}, busy{0};
    Pool pool;
    Compute compute;
    std::unique_ptr<Worker> worker;
};

}  // namespace

extern "C" {

int32_t moestro_experts_runs(const char* variant, int32_t weights, int32_t x, int64_t hidden,
                             int64_t inner) {
    return find(variant, Kind(weights), Kind(x), hidden, inner) != nullptr;
}

void* moestro_experts_new(int64_t hidden, int64_t inner, int64_t down, int32_t weights, int32_t x,
                          const char* variant, int32_t threads, const int32_t* cores,
                          int32_t n_cores, int32_t spin_us) {
    const Variant* chosen = find(variant, Kind(weights), Kind(x), hidden, inner);
    if (!chosen) return nullptr;
    const Shape shape{hidden, inner, down, Kind(weights), Kind(x)};
    return new Experts(shape, *chosen, threads, std::vector<int>(cores, cores + n_cores), spin_us);
}

void moestro_experts_delete(void* self) {
    Experts* experts = static_cast<Experts*>(self);
    experts->worker.reset();
    delete experts;
}

int32_t moestro_experts_compute(void* self, const int64_t* address, const int32_t* lo,
                                const int32_t* source, const int32_t* target, int32_t n_experts,
                                const void* x, int64_t rows, void* z, int64_t lines) {
    if (lo[0] != 0) return 4;
    for (int32_t e = 0; e < n_experts; e++) {
        if (lo[e] > lo[e + 1]) return 4;
        if (!address[e]) return 6;
    }
    for (int32_t j = 0; j < lo[n_experts]; j++)
        if (source[j] < 0 || source[j] >= rows || target[j] < 0 || target[j] >= lines) return 5;
    Experts& experts = *static_cast<Experts*>(self);
    std::lock_guard<std::mutex> mine(experts.turn);
    const int64_t began = moestro::now_ns();
    experts.compute.run({n_experts, address, lo, source, target, static_cast<const char*>(x), rows,
                         static_cast<char*>(z)});
    Experts::count(self, n_experts * experts.compute.nbytes(), moestro::now_ns() - began);
    return 0;
}

// offsets: header, answer, stats, address, lo, route, x, z. ranges: n times address and bytes.
void moestro_experts_attach(void* self, void* mailbox, const int64_t* offsets, int64_t rows,
                            int64_t top_k, int64_t n_experts, const int64_t* ranges, int32_t n) {
    Experts& experts = *static_cast<Experts*>(self);
    const Shape& shape = experts.shape;
    char* at = static_cast<char*>(mailbox);
    const auto ints = [&](int i) { return reinterpret_cast<int32_t*>(at + offsets[i]); };
    const auto longs = [&](int i) { return reinterpret_cast<int64_t*>(at + offsets[i]); };
    Limits limits{rows, top_k, n_experts, {}, 0};
    limits.blob = shape.down + shape.hidden * shape.inner * moestro::ELEMENT[shape.weights];
    for (int32_t i = 0; i < n; i++) limits.memory.emplace_back(ranges[2 * i], ranges[2 * i + 1]);
    const moestro::Fields fields{ints(0), ints(1), longs(2),        longs(3),
                                 ints(4), ints(5), at + offsets[6], at + offsets[7]};
    experts.worker = std::make_unique<moestro::Worker>(fields, limits, experts.compute, experts.turn,
                                                       experts.pool.core(0), Experts::count, self);
}

void moestro_experts_pause(void* self) { static_cast<Experts*>(self)->worker->pause(); }

void moestro_experts_resume(void* self) { static_cast<Experts*>(self)->worker->resume(); }

// totals: busy nanoseconds, bytes, jobs.
void moestro_experts_stats(void* self, int64_t* totals) {
    const Experts& experts = *static_cast<Experts*>(self);
    totals[0] = experts.busy;
    totals[1] = experts.bytes;
    totals[2] = experts.jobs;
}
}
