#include "threads.hpp"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace kvferry::engine {

namespace {

class Helpers {
 public:
  explicit Helpers(int count) {
    for (int index = 0; index < count; ++index) threads_.emplace_back([this] { serve(); });
  }

  ~Helpers() {
    {
      std::lock_guard lock(mutex_);
      closing_ = true;
    }
    called_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void share(std::int64_t tasks, const std::function<void(std::int64_t)>& work) {
    {
      std::lock_guard lock(mutex_);
      next_ = 0;
      tasks_ = tasks;
      work_ = &work;
      busy_ = threads_.size();
      ++round_;
    }
    called_.notify_all();
    take();
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void take() {
    for (std::int64_t task; (task = next_.fetch_add(1)) < tasks_;) (*work_)(task);
  }

  void serve() {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      called_.wait(lock, [&] { return closing_ || round_ != seen; });
      if (closing_) return;
      seen = round_;
      lock.unlock();
      take();
      lock.lock();
      if (--busy_ == 0) finished_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable called_, finished_;
  std::atomic<std::int64_t> next_{0};
  std::int64_t tasks_ = 0;
  const std::function<void(std::int64_t)>* work_ = nullptr;
  std::size_t busy_ = 0;
  std::uint64_t round_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

std::mutex in_use;
std::unique_ptr<Helpers> helpers;

}  // namespace

void use_threads(int count) {
  if (count < 1) {
    throw std::invalid_argument("kernels cannot compute with " + std::to_string(count) + " threads; at least 1");
  }
  std::lock_guard lock(in_use);
  helpers.reset();
  if (count > 1) helpers = std::make_unique<Helpers>(count - 1);
}

void parallel(std::int64_t tasks, const std::function<void(std::int64_t)>& work) {
  std::unique_lock lock(in_use, std::try_to_lock);
  if (tasks > 1 && lock.owns_lock() && helpers) {
    helpers->share(tasks, work);
    return;
  }
  for (std::int64_t task = 0; task < tasks; ++task) work(task);
}

}  // namespace kvferry::engine
