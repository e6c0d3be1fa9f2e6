// A rank's log in shared memory: it appends records, and every peer reads them at its own pace.
//
// One writer, several readers. `head` counts the bytes ever written, each reader's `tail` the bytes it has done with; the
// writer never overwrites what some reader still needs. Records are contiguous, so a reader can fold straight out of the
// log. A record says which readers it is for; the others step over it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gradwire {

constexpr std::size_t LINE = 64;
constexpr std::size_t MAX_READERS = 64;

struct alignas(LINE) Counter {
    std::atomic<std::uint64_t> value;
};

struct alignas(LINE) Record {
    std::uint64_t length;  // of the record with its payload, padded to LINE
    std::uint64_t readers;
    std::uint64_t sequence;
    std::uint64_t fingerprint;
    std::uint64_t nbytes;
    std::uint32_t tile;
    std::uint32_t round;
    std::uint64_t reserved[2];
};
static_assert(sizeof(Record) == LINE);

struct LogHeader {
    Counter head;
    Counter tails[MAX_READERS];
};

inline std::size_t padded(std::size_t nbytes) { return (nbytes + LINE - 1) / LINE * LINE; }

class LogWriter {
  public:
    LogWriter(void* memory, std::size_t bytes)
        : header_(static_cast<LogHeader*>(memory)),
          data_(static_cast<std::byte*>(memory) + sizeof(LogHeader)),
          capacity_(bytes - sizeof(LogHeader)) {}

    // Memory for a record with this payload, or null if some reader must first read on. Nothing is visible until publish().
    Record* reserve(std::size_t nbytes, std::uint64_t readers_of_log) {
        const std::uint64_t length = sizeof(Record) + padded(nbytes);
        const std::uint64_t at = head_ % capacity_;
        const std::uint64_t gap = at + length > capacity_ ? capacity_ - at : 0;
        if (head_ + gap + length - oldest_ > capacity_) {
            oldest_ = slowest(readers_of_log);
            if (head_ + gap + length - oldest_ > capacity_) return nullptr;
        }
        if (gap) {
            auto* filler = reinterpret_cast<Record*>(data_ + at);
            filler->length = gap;
            filler->readers = 0;
            head_ += gap;
        }
        auto* record = reinterpret_cast<Record*>(data_ + head_ % capacity_);
        record->length = length;
        record->nbytes = nbytes;
        head_ += length;
        return record;
    }
    static std::byte* payload(Record* record) { return reinterpret_cast<std::byte*>(record) + sizeof(Record); }
    bool drained(std::uint64_t readers) const { return slowest(readers) == head_; }
    void publish() { header_->head.value.store(head_, std::memory_order_release); }
    std::size_t largest() const { return capacity_ / 2 - sizeof(Record); }

  private:
    std::uint64_t slowest(std::uint64_t readers) const {
        std::uint64_t least = head_;
        for (std::size_t i = 0; i < MAX_READERS; ++i)
            if (readers >> i & 1) {
                const std::uint64_t tail = header_->tails[i].value.load(std::memory_order_acquire);
                least = tail < least ? tail : least;
            }
        return least;
    }

    LogHeader* header_;
    std::byte* data_;
    std::uint64_t capacity_;
    std::uint64_t head_ = 0;
    std::uint64_t oldest_ = 0;
};

class LogReader {
  public:
    LogReader(void* memory, std::size_t bytes, unsigned reader)
        : header_(static_cast<LogHeader*>(memory)),
          data_(static_cast<const std::byte*>(memory) + sizeof(LogHeader)),
          capacity_(bytes - sizeof(LogHeader)),
          reader_(reader) {}

    // The next record for this reader, or null. The lengths are the writer's: one that makes no sense is `broken`.
    const Record* peek() {
        while (true) {
            if (next_ == seen_) {
                seen_ = header_->head.value.load(std::memory_order_acquire);
                if (next_ == seen_) return nullptr;
            }
            const auto* record = reinterpret_cast<const Record*>(data_ + next_ % capacity_);
            const std::uint64_t length = record->length;
            if (length < sizeof(Record) || length % LINE || length > seen_ - next_ || next_ % capacity_ + length > capacity_) {
                broken = true;
                return nullptr;
            }
            if (record->readers >> reader_ & 1) return record;
            next_ += length;
        }
    }
    static const std::byte* payload(const Record* record) {
        return reinterpret_cast<const std::byte*>(record) + sizeof(Record);
    }
    void advance(const Record* record) { next_ += record->length; }
    // Everything stepped over so far may be overwritten.
    void release() { header_->tails[reader_].value.store(next_, std::memory_order_release); }
    bool broken = false;

  private:
    LogHeader* header_;
    const std::byte* data_;
    std::uint64_t capacity_;
    unsigned reader_;
    std::uint64_t next_ = 0;
    std::uint64_t seen_ = 0;
};

}  // namespace gradwire
