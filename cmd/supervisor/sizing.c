#include "cmd/supervisor/sizing.h"

#include "proto/bytes_text.h"
#include "proto/parse.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#define STEP_SHARE 16 /* an `auto` pool changes by a sixteenth at least */
#define STEP_BYTES (INT64_C(1) << 30)

static int64_t least_of(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Free bytes as a signed number that may be added to. */
static int64_t signed_bytes(uint64_t bytes)
{
    return bytes < (uint64_t)INT64_MAX / 4 ? (int64_t)bytes : INT64_MAX / 4;
}

static int64_t slots_bytes(const struct sizing *sizing, int64_t slots)
{
    return slots * (int64_t)sizing->slot_bytes;
}

uint32_t sizing_cap(const struct sizing *sizing, const struct sizing_view *view, enum sizing_bound *ret_bound)
{
    const struct room *room = &view->room;
    int64_t pool = slots_bytes(sizing, view->standing), reserve = (int64_t)sizing->reserve;
    const int64_t bounds[] = {[BOUND_MEMORY] = pool + signed_bytes(room->memory) - reserve,
                              [BOUND_CGROUP] = pool + signed_bytes(room->cgroup.free) - reserve,
                              [BOUND_SHM] = pool + signed_bytes(room->shm_free),
                              [BOUND_EXPERTS] = slots_bytes(sizing, sizing->most)};
    enum sizing_bound bound = BOUND_EXPERTS;
    for (int b = BOUND_MEMORY; b < BOUND_EXPERTS; b++)
        if (bounds[b] < bounds[bound])
            bound = (enum sizing_bound)b;
    if (ret_bound)
        *ret_bound = bound;
    return (uint32_t)most_of(bounds[bound] / (int64_t)sizing->slot_bytes, sizing->least);
}

/* `left`: bytes free once the target is reached. */
static bool shrink(struct sizing *sizing, const struct sizing_view *view, int64_t left)
{
    int64_t reserve = (int64_t)sizing->reserve, slot = (int64_t)sizing->slot_bytes;
    bool wanted = left < reserve / 2 || (view->pressure && left < 2 * reserve);
    if (!wanted || sizing->target <= sizing->least)
        return false;
    int64_t step = most_of(sizing->target / STEP_SHARE, 1), lacking = (reserve - left + slot - 1) / slot;
    sizing->target = (uint32_t)most_of(sizing->target - most_of(step, lacking), sizing->least);
    sizing->calm_ms = view->now_ms + SIZING_CALM_MS;
    return true;
}

static bool grow(struct sizing *sizing, const struct sizing_view *view, int64_t left, int64_t shm_left)
{
    if (view->now_ms < sizing->calm_ms || sizing->target >= sizing->most)
        return false;
    int64_t slot = (int64_t)sizing->slot_bytes;
    int64_t step = most_of(least_of(slots_bytes(sizing, sizing->most) / STEP_SHARE, STEP_BYTES), slot);
    int64_t room = least_of(left - (int64_t)sizing->reserve, shm_left);
    if (room < step)
        return false;
    int64_t slots = most_of(room / 2, step) / slot;
    sizing->target = (uint32_t)least_of(sizing->target + slots, sizing->most);
    return true;
}

bool sizing_follow(struct sizing *sizing, const struct sizing_view *view)
{
    if (!sizing->automatic)
        return false;
    if (view->refused == sizing->target && view->standing < sizing->target) {
        sizing->target = (uint32_t)most_of(view->standing, sizing->least);
        sizing->calm_ms = view->now_ms + SIZING_CALM_MS;
        return view->refused != sizing->target;
    }
    /* What the pool still gives back, or takes, on its way to the target. */
    int64_t ahead = slots_bytes(sizing, (int64_t)view->standing - sizing->target);
    int64_t left = signed_bytes(room_available(&view->room)) + ahead;
    return shrink(sizing, view, left) || grow(sizing, view, left, signed_bytes(view->room.shm_free) + ahead);
}

static int check_room(const struct sizing *sizing, const struct sizing_view *view, uint64_t slots,
                      struct error *ret_error)
{
    uint64_t bytes = slots * sizing->slot_bytes, pool = view->standing * sizing->slot_bytes;
    uint64_t available = room_available(&view->room);
    if (bytes <= pool)
        return 0;
    if (bytes - pool > available)
        return error_set(ret_error, ENOMEM,
                         "a pool of %s needs %s more and memory has %s free: choose a smaller --size, or raise the "
                         "memory limit of this control group",
                         bytes_text(bytes).text, bytes_text(bytes - pool).text, bytes_text(available).text);
    if (bytes - pool > view->room.shm_free)
        return error_set(ret_error, ENOSPC,
                         "a pool of %s needs %s more and /dev/shm has %s free: choose a smaller --size, or enlarge it "
                         "(mount -o remount,size=SIZE /dev/shm)",
                         bytes_text(bytes).text, bytes_text(bytes - pool).text, bytes_text(view->room.shm_free).text);
    return 0;
}

int sizing_set(struct sizing *sizing, const struct sizing_view *view, const char *text, struct error *ret_error)
{
    uint64_t bytes;
    double percent;
    int status;
    if (!strcmp(text, "auto")) {
        sizing->automatic = true;
        sizing->target = sizing_cap(sizing, view, NULL);
        return 0;
    }
    if (!parse_percent(text, &percent)) {
        uint64_t memory = room_available(&view->room) + view->standing * sizing->slot_bytes + sizing->fixed_bytes;
        bytes = (uint64_t)((double)memory * percent / 100);
    } else if ((status = parse_size(text, &bytes)) == -ERANGE) {
        return error_set(ret_error, EINVAL, "size=%.40s is too large: a size is below " PARSE_SIZE_LIMIT, text);
    } else if (status < 0) {
        return error_set(ret_error, EINVAL,
                         "size=%.40s: a size (64G, 1.5GiB), a share of the free memory (80%%) or auto is expected",
                         text);
    }
    uint64_t slots = bytes / sizing->slot_bytes;
    if (slots < sizing->top_k)
        return error_set(ret_error, EINVAL,
                         "size=%.40s holds %" PRIu64
                         " expert%s of %s, and a layer needs %u at once: give it at least %s (--size %" PRIu64 ")",
                         text, slots, slots == 1 ? "" : "s", bytes_text(sizing->slot_bytes).text, sizing->top_k,
                         bytes_text(sizing->top_k * sizing->slot_bytes).text, sizing->top_k * sizing->slot_bytes);
    slots = slots < sizing->most ? slots : sizing->most;
    status = check_room(sizing, view, slots, ret_error);
    if (status)
        return status;
    sizing->automatic = false;
    sizing->target = (uint32_t)slots;
    return 0;
}
