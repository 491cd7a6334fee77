#include "io_daemon/follower.h"

#define AT_ONCE 256u

void follower_open(struct control *control, struct placement *placement, struct guesses *guesses,
                   struct learning *learning, struct follower *ret_follower)
{
    *ret_follower = (struct follower){
        .control = control, .placement = placement, .guesses = guesses, .learning = learning, .expert = NOBODY};
    ret_follower->replay = true;
    follower_read(ret_follower);
    ret_follower->replay = false;
}

static void tell(struct follower *follower)
{
    if (follower->expert == NOBODY || follower->told)
        return;
    follower->told = true;
    placement_use(follower->placement, follower->expert, follower->prefill ? LFRU_PREFILL : LFRU_DECODE);
    if (follower->replay)
        return;
    guesses_use(follower->guesses, follower->hit);
    if (follower->learning)
        learning_note(follower->learning, follower->expert);
}

static void take_use(struct follower *follower, const struct use *use)
{
    bool prefill = use->flags & USE_PREFILL;
    if (use->expert >= follower->placement->pool->expert_count)
        return; /* only a scribbler writes that */
    if (!(use->flags & USE_LAYER) && use->expert == follower->expert) {
        follower->prefill = follower->prefill && prefill;
        return;
    }
    tell(follower);
    follower->expert = use->expert;
    follower->prefill = prefill;
    follower->hit = use->flags & USE_HIT;
    follower->told = false;
}

void follower_read(struct follower *follower)
{
    struct use uses[AT_ONCE];
    uint32_t count = AT_ONCE;
    for (uint32_t taken = 0; taken < USE_ENTRIES && count == AT_ONCE; taken += count) {
        uint64_t lost;
        count = uses_read(&follower->control->uses, &follower->place, uses, AT_ONCE, &lost);
        for (uint32_t i = 0; i < count; i++)
            take_use(follower, &uses[i]);
    }
    tell(follower);
    atomic_store_explicit(&follower->control->iod.uses_read, follower->place, memory_order_relaxed);
}
