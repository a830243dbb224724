// The threads that kernels share their work between.
#pragma once

#include <cstdint>
#include <functional>

namespace kvferry::engine {

// How many threads kernels compute with, the caller included. 1 at first; called before anything is computed, or
// between two calls. Throws std::invalid_argument below 1.
void use_threads(int count);

// Calls `work(task)` for each of `tasks`, shared out one by one between the threads, and waits for all. One caller at a
// time computes with the helpers; another one that comes meanwhile does its work alone. `work` must not throw.
void parallel(std::int64_t tasks, const std::function<void(std::int64_t)>& work);

}  // namespace kvferry::engine
