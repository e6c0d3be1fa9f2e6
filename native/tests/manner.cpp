// Which way bytes are staged, where what they cost is known.
#include "check.hpp"
#include "manner.hpp"

using namespace gradwire;

namespace {

constexpr std::size_t NBYTES = 128 << 10;

// Calls in which messages of NBYTES take that many nanoseconds to write and to read; how many of them went past the caches.
int streamed_of(Manner& manner, int calls, double usual, double streamed) {
    int found = 0;
    for (int i = 0; i < calls; ++i) {
        manner.begin();
        for (int message = 0; message < 4; ++message) {
            const bool past = manner.streams(NBYTES);
            manner.wrote(past, NBYTES, past ? streamed : usual);
            manner.has_read(past, NBYTES, past ? streamed : usual);
            found += message == 0 && past;
        }
    }
    return found;
}

void the_cheaper_way_is_taken_and_the_other_tried_now_and_then() {
    Manner manner;
    const int few = streamed_of(manner, 320, 10'000, 20'000);
    CHECK(few >= 5 && few <= 15);
}

void what_has_become_cheaper_is_noticed_and_again() {
    Manner manner;
    streamed_of(manner, 320, 10'000, 20'000);
    streamed_of(manner, 100, 40'000, 20'000);
    CHECK(streamed_of(manner, 320, 40'000, 20'000) > 300);
    streamed_of(manner, 100, 10'000, 20'000);
    CHECK(streamed_of(manner, 320, 10'000, 20'000) < 20);
}

void small_gains_change_nothing() {
    Manner manner;
    CHECK(streamed_of(manner, 320, 10'000, 9'000) < 20);
}

void one_long_break_changes_nothing() {
    Manner manner;
    streamed_of(manner, 320, 10'000, 20'000);
    manner.wrote(false, NBYTES, 1e9);
    CHECK(streamed_of(manner, 320, 10'000, 20'000) < 20);
}

void short_messages_are_stored_as_usual() {
    Manner manner;
    streamed_of(manner, 200, 40'000, 20'000);
    CHECK(manner.streams(Manner::SMALLEST) && !manner.streams(Manner::SMALLEST - 1));
}

}  // namespace

int main() {
    RUN(the_cheaper_way_is_taken_and_the_other_tried_now_and_then);
    RUN(what_has_become_cheaper_is_noticed_and_again);
    RUN(small_gains_change_nothing);
    RUN(one_long_break_changes_nothing);
    RUN(short_messages_are_stored_as_usual);
}
