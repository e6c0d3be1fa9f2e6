// A FIFO queue in a vector: allocates only while it grows.
#pragma once

#include <cstddef>
#include <vector>

namespace gradwire {

template <class T>
class Ring {
  public:
    bool empty() const { return size_ == 0; }
    T& front() { return items_[first_]; }
    void pop() {
        first_ = (first_ + 1) & (items_.size() - 1);
        --size_;
    }
    void push(const T& item) {
        if (size_ == items_.size()) grow();
        items_[(first_ + size_) & (items_.size() - 1)] = item;
        ++size_;
    }

  private:
    void grow() {
        std::vector<T> larger(items_.empty() ? 16 : 2 * items_.size());  // a power of two
        for (std::size_t i = 0; i < size_; ++i) larger[i] = items_[(first_ + i) & (items_.size() - 1)];
        items_.swap(larger);
        first_ = 0;
    }

    std::vector<T> items_;
    std::size_t first_ = 0, size_ = 0;
};

}  // namespace gradwire
