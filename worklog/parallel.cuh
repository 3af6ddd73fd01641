// The references' float64 takes a while: on all processors of the host.
#ifndef WORKLOG_PARALLEL_CUH
#define WORKLOG_PARALLEL_CUH

#include <atomic>
#include <thread>
#include <vector>

// Calls f(i) for i = 0 to count - 1, on all processors of the host.
template <typename F>
void in_parallel(size_t count, const F &f) {
  std::atomic<size_t> next(0);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < std::thread::hardware_concurrency(); ++t)
    threads.emplace_back([&] {
      for (size_t i; (i = next++) < count;) f(i);
    });
  for (std::thread &thread : threads) thread.join();
}

#endif
