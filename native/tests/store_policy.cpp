// Tests the choice of the store policy under given costs.
#include "check.hpp"
#include "store_policy.hpp"

using namespace gradwire;

namespace {

constexpr std::size_t NBYTES = 128 << 10;

// Makes calls whose messages of NBYTES take these times (in nanoseconds) to write and to read; returns how many of the
// calls used non-temporal stores.
int streamed_of(StorePolicy& policy, int calls, double usual, double streamed) {
    int found = 0;
    for (int i = 0; i < calls; ++i) {
        policy.begin_call();
        for (int message = 0; message < 4; ++message) {
            const bool streams = policy.streams(NBYTES);
            policy.record_write(streams, NBYTES, streams ? streamed : usual);
            policy.record_read(streams, NBYTES, streams ? streamed : usual);
            found += message == 0 && streams;
        }
    }
    return found;
}

void policy_with_steady_costs_uses_the_cheaper_store_and_probes_the_other() {
    StorePolicy policy;
    const int few = streamed_of(policy, 320, 10'000, 20'000);
    CHECK(few >= 5 && few <= 15);
}

void policy_after_costs_change_switches_and_switches_back() {
    StorePolicy policy;
    streamed_of(policy, 320, 10'000, 20'000);
    streamed_of(policy, 100, 40'000, 20'000);
    CHECK(streamed_of(policy, 320, 40'000, 20'000) > 300);
    streamed_of(policy, 100, 10'000, 20'000);
    CHECK(streamed_of(policy, 320, 10'000, 20'000) < 20);
}

void policy_with_small_gains_does_not_switch() {
    StorePolicy policy;
    CHECK(streamed_of(policy, 320, 10'000, 9'000) < 20);
}

void policy_after_one_outlier_does_not_switch() {
    StorePolicy policy;
    streamed_of(policy, 320, 10'000, 20'000);
    policy.record_write(false, NBYTES, 1e9);
    CHECK(streamed_of(policy, 320, 10'000, 20'000) < 20);
}

void policy_for_short_messages_uses_ordinary_stores() {
    StorePolicy policy;
    streamed_of(policy, 200, 40'000, 20'000);
    CHECK(policy.streams(StorePolicy::SMALLEST) && !policy.streams(StorePolicy::SMALLEST - 1));
}

}  // namespace

int main() {
    RUN(policy_with_steady_costs_uses_the_cheaper_store_and_probes_the_other);
    RUN(policy_after_costs_change_switches_and_switches_back);
    RUN(policy_with_small_gains_does_not_switch);
    RUN(policy_after_one_outlier_does_not_switch);
    RUN(policy_for_short_messages_uses_ordinary_stores);
}
