// A test is a function that throws; `main` runs them all, or those whose names contain its second argument.
#pragma once

#include <poll.h>

#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "events.hpp"

namespace kvferry::testing {

// How long a test waits for anything at all.
constexpr int kPatienceMs = 60'000;
constexpr double kPatienceS = 60.0;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  Test(const char* name, void (*run)());
};

// The file of the libucp to test with.
const std::string& ucp_library();

#define KVFERRY_TEST(name)                                      \
  static void name();                                           \
  static const kvferry::testing::Test test_##name{#name, name}; \
  static void name()

#define CHECK(condition)                                          \
  do {                                                            \
    if (!(condition)) {                                           \
      std::ostringstream where;                                   \
      where << __FILE__ << ":" << __LINE__ << ": " << #condition; \
      throw kvferry::testing::Failure(where.str());               \
    }                                                             \
  } while (false)

#define CHECK_THROWS(expression, Error)     \
  do {                                      \
    bool thrown = false;                    \
    try {                                   \
      (void)(expression);                   \
    } catch (const Error&) {                \
      thrown = true;                        \
    }                                       \
    CHECK(thrown && #expression " throws"); \
  } while (false)

// What a queue of events has told so far. Every rule about their order is checked as they come.
class Observer {
 public:
  explicit Observer(kvferry::EventQueue& events) : events_(events) {}

  void collect() {
    for (kvferry::Event& event : events_.drain()) {
      CHECK(fenced.count(event.peer) == 0);
      switch (event.kind) {
        case kvferry::EventKind::kCompleted:
          CHECK(completed.emplace(event.batch, event.text).second);
          break;
        case kvferry::EventKind::kLost:
        case kvferry::EventKind::kLate:
          CHECK(down.emplace(event.peer, event).second);
          break;
        case kvferry::EventKind::kFenced:
          fenced.insert(event.peer);
          break;
      }
    }
  }

  template <typename Condition>
  void wait(Condition condition) {
    for (collect(); !condition(); collect()) {
      pollfd readable{events_.fileno(), POLLIN, 0};
      CHECK(::poll(&readable, 1, kPatienceMs) == 1);
    }
  }

  void wait_for(const std::vector<int64_t>& batches) {
    wait([&] {
      for (int64_t batch : batches)
        if (completed.count(batch) == 0) return false;
      return true;
    });
  }

  std::map<int64_t, std::string> completed;  // errors by batch
  std::map<int64_t, kvferry::Event> down;
  std::set<int64_t> fenced;

 private:
  kvferry::EventQueue& events_;
};

}  // namespace kvferry::testing
