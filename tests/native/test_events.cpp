#include <thread>

#include "harness.hpp"

using namespace kvferry;
using kvferry::testing::Observer;

KVFERRY_TEST(events_of_many_threads_all_arrive_and_the_descriptor_says_so) {
  EventQueue events;
  Observer observer(events);
  constexpr int kThreads = 4;
  constexpr int kEach = 2000;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&events, thread] {
      for (int i = 0; i < kEach; ++i) events.push({EventKind::kCompleted, thread, thread * kEach + i, "text"});
    });
  observer.wait([&] { return observer.completed.size() == kThreads * kEach; });
  for (auto& thread : threads) thread.join();
  pollfd readable{events.fileno(), POLLIN, 0};
  CHECK(::poll(&readable, 1, 0) == 0);
  CHECK(events.drain().empty());
}
