#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <numeric>
#include <thread>

#include "copier.hpp"
#include "harness.hpp"

using namespace kvferry;
using kvferry::testing::kPatienceS;
using kvferry::testing::Observer;

namespace {

constexpr int64_t kSmall = 4096;
constexpr int64_t kLarge = 4 << 20;  // more than is copied at once
constexpr int64_t kBatches = 16;
constexpr int64_t kBytes = kBatches * kLarge;

int open_process(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

// Ours and the peer's memory, and this process as the peer.
struct Ends {
  std::vector<char> local = std::vector<char>(kBytes, 'l');
  std::vector<char> remote = std::vector<char>(kBytes, 'r');
  int pidfd = open_process(getpid());
  Copier copier{"test"};
  Observer observer{copier.events()};

  ~Ends() {
    copier.close();
    ::close(pidfd);
  }

  int64_t add_peer() { return copier.add_peer(pidfd, {{remote.data(), kBytes}}); }

  int64_t post(int64_t peer, bool write, int64_t offset, int64_t bytes, double timeout_s = kPatienceS) {
    return copier.post(peer, write, local.data(), remote.data(), {{offset, offset, bytes}}, timeout_s);
  }
};

}  // namespace

KVFERRY_TEST(copies_both_ways) {
  Ends ends;
  const int64_t peer = ends.add_peer();
  const int64_t small = ends.post(peer, false, 100, kSmall);
  ends.observer.collect();
  CHECK(ends.observer.completed.at(small).empty());  // without another thread
  const int64_t large = ends.post(peer, false, kSmall, kLarge - kSmall);
  ends.observer.wait_for({large});
  CHECK(ends.local[99] == 'l' && ends.local[100] == 'r' && ends.local[kLarge - 1] == 'r');
  ends.local.assign(kLarge, 'n');
  ends.observer.wait_for({ends.post(peer, true, 0, kLarge)});
  CHECK(ends.remote[0] == 'n' && ends.remote[kLarge - 1] == 'n');
}

KVFERRY_TEST(many_threads_post_while_their_peers_are_fenced) {
  Ends ends;
  constexpr int kThreads = 4;
  constexpr int kPeers = 10;
  constexpr int kEach = 40;
  std::vector<int64_t> peers;
  for (int i = 0; i < kPeers; ++i) peers.push_back(ends.add_peer());
  std::array<std::atomic<int>, kPeers> posted{};
  std::atomic<int> fenced{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kPeers; ++i) {
        // Each batch its own stretch: the copier does not keep users from racing with themselves.
        int64_t offset = thread * (kBytes / kThreads);
        try {
          for (int n = 0; n < kEach; ++n, ++posted[i]) {
            const int64_t bytes = n % 15 == 0 ? kLarge : kSmall;
            ends.post(peers[i], n % 2 == 0, offset, bytes);
            offset += bytes;
          }
        } catch (const std::runtime_error&) {  // it has been fenced
        }
        while (fenced <= i) std::this_thread::yield();
      }
    });
  }
  for (int i = 0; i < kPeers; ++i) {
    const int64_t peer = peers[i];
    ends.observer.wait([&] { return posted[i] > 0; });
    ends.copier.fence(peer);
    ends.copier.fence(peer);
    ends.observer.wait([&] { return ends.observer.fenced.count(peer) == 1; });
    ++fenced;
  }
  for (auto& thread : threads) thread.join();
  ends.observer.collect();
  CHECK(ends.observer.completed.size() == static_cast<size_t>(std::accumulate(posted.begin(), posted.end(), 0)));
  CHECK(ends.observer.down.empty());
}

KVFERRY_TEST(a_fence_ends_what_is_queued) {
  Ends ends;
  const int64_t peer = ends.add_peer();
  std::vector<int64_t> batches;
  for (int i = 0; i < kBatches; ++i) batches.push_back(ends.post(peer, false, i * kLarge, kLarge));
  ends.copier.fence(peer);
  ends.observer.wait([&] { return ends.observer.fenced.count(peer) == 1; });
  ends.local.assign(kBytes, 'x');  // a race, if anything were still being copied
  CHECK(ends.observer.completed.size() == batches.size());
  CHECK_THROWS(ends.post(peer, false, 0, 1), std::runtime_error);
}

KVFERRY_TEST(a_batch_that_is_late_is_told_once_and_ends) {
  Ends ends;
  const int64_t busy = ends.add_peer();
  const int64_t late = ends.add_peer();
  const int64_t first = ends.post(busy, false, 0, kBytes - kLarge);
  std::vector<int64_t> batches;
  for (int i = 0; i < 3; ++i) batches.push_back(ends.post(late, false, 0, kLarge, 1e-6));
  batches.push_back(ends.post(busy, false, kBytes - kLarge, kSmall));
  batches.push_back(first);
  ends.observer.wait_for(batches);
  CHECK(ends.observer.down.size() == 1);
  const Event& event = ends.observer.down.at(late);
  CHECK(event.kind == EventKind::kLate);
  CHECK(event.text == "batch 1 (a read of 4194304 bytes) was not over within 1e-06 s");
  CHECK(ends.observer.completed.at(1) == event.text);
  CHECK(ends.observer.completed.at(first).empty() && ends.observer.completed.at(4).empty());
  CHECK_THROWS(ends.post(busy, false, 0, 1, 0.0), std::invalid_argument);
}

KVFERRY_TEST(a_process_that_has_ended_completes_nothing) {
  Ends ends;
  const pid_t child = fork();
  if (child == 0) _exit(0);
  const int pidfd = open_process(child);
  siginfo_t info;
  CHECK(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED) == 0);
  const int64_t peer = ends.copier.add_peer(pidfd, {});
  const int64_t small = ends.post(peer, true, 0, kSmall);
  const int64_t large = ends.post(peer, true, kLarge, kLarge);
  ends.observer.wait_for({small, large});
  for (int64_t batch : {small, large}) CHECK(ends.observer.completed.at(batch) == "the peer's process has ended");
  ends.copier.fence(peer);
  ends.observer.wait([&] { return ends.observer.fenced.count(peer) == 1; });
  ::close(pidfd);
}

KVFERRY_TEST(closing_while_others_post) {
  Ends ends;
  const int64_t peer = ends.add_peer();
  std::atomic<int> posted{0};
  std::thread poster([&] {
    try {
      for (;; ++posted) {
        const int64_t batch = posted;
        ends.post(peer, false, batch % kBatches * kLarge, batch < kBatches ? kLarge : 0);
      }
    } catch (const std::runtime_error&) {
    }
  });
  ends.observer.wait([&] { return posted > 10; });
  ends.copier.close();
  poster.join();
  ends.observer.collect();
  CHECK(static_cast<int>(ends.observer.completed.size()) == posted);
  CHECK(ends.observer.fenced.count(peer) == 1);
}
