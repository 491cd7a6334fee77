/* The pool's size while the instance runs: what is wanted (sizing.h decides), and telling iod. */
#include "cmd/supervisor/supervise.h"

#include "cmd/supervisor/pressure.h"
#include "proto/bytes_text.h"

#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

/* Between two looks at the free memory: where the kernel reports stalls, and a pool that holds every expert has
 * nothing to gain; where it may grow; where the kernel reports nothing. */
#define LOOK_FULL_MS 30000
#define LOOK_MS 5000
#define LOOK_ALONE_MS 2000
#define HOTTEST 10u /* experts in the answer to `pool` */

static int64_t look_again_ms(const struct supervisor *supervisor)
{
    bool full = supervisor->sizing.target == supervisor->sizing.most;
    return supervisor->pressure_fd < 0 ? LOOK_ALONE_MS : full ? LOOK_FULL_MS : LOOK_MS;
}

void supervisor_open_size(struct supervisor *supervisor)
{
    const struct plan *plan = &supervisor->plan;
    supervisor->sizing = (struct sizing){.slot_bytes = plan->slot_bytes,
                                         .reserve = plan->reserve,
                                         .fixed_bytes = plan_fixed_bytes(plan),
                                         .top_k = plan->facts.config.top_k,
                                         .least = plan_least_slots(plan),
                                         .most = plan->facts.pool_slots,
                                         .automatic = plan->automatic,
                                         .target = plan->pool_slots};
    supervisor->pressure_fd = pressure_open("");
    supervisor->look_ms = supervisor_now_ms() + look_again_ms(supervisor);
    atomic_store(&supervisor->control->pool_target, supervisor->sizing.target);
}

static int look(const struct supervisor *supervisor, bool pressure, struct sizing_view *ret_view,
                struct error *ret_error)
{
    *ret_view = (struct sizing_view){.standing = pool_slots_ready(&supervisor->pool),
                                     .refused = atomic_load(&supervisor->control->iod.pool_refused),
                                     .pressure = pressure,
                                     .now_ms = supervisor_now_ms()};
    return room_read("", &ret_view->room, ret_error);
}

static void tell_iod(struct supervisor *supervisor, uint32_t before, const char *why)
{
    uint32_t target = supervisor->sizing.target;
    atomic_store(&supervisor->control->pool_target, target);
    supervisor_ring(supervisor->doorbell_fd);
    if (target == before)
        return;
    supervisor->size_before = before;
    supervisor->size_changed_ms = supervisor_now_ms();
    snprintf(supervisor->size_why, sizeof supervisor->size_why, "%s", why);
    supervisor_say(supervisor, "the pool shall have %u slots, not %u: %s", target, before, why);
}

void supervisor_take_pressure(struct supervisor *supervisor, short events)
{
    if (events & (POLLERR | POLLNVAL)) {
        close(supervisor->pressure_fd); /* the control group is gone: looking now and then remains */
        supervisor->pressure_fd = -1;
        return;
    }
    supervisor->pressure = true;
    supervisor->look_ms = 0;
}

int64_t supervisor_follow_room(struct supervisor *supervisor)
{
    struct sizing *sizing = &supervisor->sizing;
    struct sizing_view view;
    struct error error;
    int64_t now = supervisor_now_ms();
    bool pressure = supervisor->pressure;
    supervisor->pressure = false;
    if (!sizing->automatic || !supervisor->served || supervisor->stopping)
        return INT64_MAX;
    if (now < supervisor->look_ms)
        return supervisor->look_ms;
    uint32_t before = sizing->target;
    if (!look(supervisor, pressure, &view, &error) && sizing_follow(sizing, &view)) {
        char why[128];
        if (view.refused == before && view.standing < before)
            snprintf(why, sizeof why, "memory or /dev/shm had no room for %u slots", before);
        else
            snprintf(why, sizeof why, "%s of memory are free, %s are to stay so%s",
                     bytes_text(room_available(&view.room)).text, bytes_text(sizing->reserve).text,
                     pressure ? ", and processes stall" : "");
        tell_iod(supervisor, before, why);
    }
    supervisor->look_ms = now + look_again_ms(supervisor);
    return supervisor->look_ms;
}

json_t *supervisor_size_json(const struct supervisor *supervisor)
{
    const struct sizing *sizing = &supervisor->sizing;
    struct sizing_view view;
    struct error error;
    json_t *size =
        json_pack("{s:I, s:I, s:I, s:I, s:b, s:I}", "slots", (json_int_t)sizing->target, "standing",
                  (json_int_t)pool_slots_ready(&supervisor->pool), "slot_bytes", (json_int_t)sizing->slot_bytes,
                  "bytes", (json_int_t)(pool_slots_ready(&supervisor->pool) * sizing->slot_bytes), "auto",
                  (int)sizing->automatic, "reserve", (json_int_t)sizing->reserve);
    if (supervisor->size_changed_ms)
        json_object_set_new(size, "last_change",
                            json_pack("{s:I, s:I, s:s, s:f}", "from", (json_int_t)supervisor->size_before, "to",
                                      (json_int_t)sizing->target, "why", supervisor->size_why, "seconds_ago",
                                      (double)(supervisor_now_ms() - supervisor->size_changed_ms) / 1000));
    if (look(supervisor, false, &view, &error))
        return size;
    enum sizing_bound bound;
    uint32_t cap = sizing_cap(sizing, &view, &bound);
    const char *const by[] = {[BOUND_MEMORY] = "memory",
                              [BOUND_CGROUP] = view.room.cgroup.file,
                              [BOUND_SHM] = "/dev/shm",
                              [BOUND_EXPERTS] = "experts"};
    if (view.refused == sizing->target && view.standing < sizing->target)
        json_object_set_new(size, "refused", json_true());
    json_object_set_new(size, "cap", json_integer((json_int_t)cap));
    json_object_set_new(size, "cap_by", json_string(by[bound]));
    json_object_set_new(size, "free", json_integer((json_int_t)room_available(&view.room)));
    json_object_set_new(size, "shm_free", json_integer((json_int_t)view.room.shm_free));
    return size;
}

/* ---- the op `pool` ---- */

struct warm {
    uint32_t expert;
    float heat;
    uint64_t used;
};

static bool is_warmer(const struct warm *a, const struct warm *b)
{
    return a->heat > b->heat || (a->heat == b->heat && a->used > b->used);
}

/* The warmest READY experts, warmest first; where the policy has not spoken yet, those used last. */
static uint32_t find_hottest(const struct pool *pool, struct warm ret_warm[HOTTEST])
{
    uint32_t count = 0;
    for (uint32_t s = 0; s < pool->slot_count; s++) {
        const struct slot *slot = &pool->slots[s];
        struct warm warm = {.expert = atomic_load_explicit(&slot->expert, memory_order_relaxed),
                            .heat = atomic_load_explicit(&slot->heat, memory_order_relaxed),
                            .used = atomic_load_explicit(&slot->used, memory_order_relaxed)};
        if (slot_state_of(atomic_load(&slot->state)) != SLOT_READY || warm.expert >= pool->expert_count ||
            (count == HOTTEST && !is_warmer(&warm, &ret_warm[count - 1])))
            continue;
        uint32_t at = count < HOTTEST ? count++ : count - 1;
        for (; at > 0 && is_warmer(&warm, &ret_warm[at - 1]); at--)
            ret_warm[at] = ret_warm[at - 1];
        ret_warm[at] = warm;
    }
    return count;
}

/* The layer whose experts are number `index` among the MoE layers. */
static uint32_t layer_of(const struct model_config *config, uint32_t index)
{
    uint32_t layer = 0;
    while (layer < config->layers + config->mtp_layers && model_moe_index(config, layer) != (int)index)
        layer++;
    return layer;
}

static json_t *hottest_json(const struct supervisor *supervisor)
{
    const struct model_config *config = &supervisor->plan.facts.config;
    struct warm warm[HOTTEST];
    json_t *list = json_array();
    uint32_t count = find_hottest(&supervisor->pool, warm);
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(list, json_pack("{s:I, s:I, s:f, s:I}", "layer",
                                              (json_int_t)layer_of(config, warm[i].expert / config->experts), "expert",
                                              (json_int_t)(warm[i].expert % config->experts), "heat",
                                              isfinite(warm[i].heat) ? (double)warm[i].heat : 0.0, "used",
                                              (json_int_t)warm[i].used));
    return list;
}

static json_t *refusal(const char *message)
{
    return json_pack("{s:b, s:{s:s, s:s}}", "ok", 0, "error", "code", "bad_request", "message", message);
}

json_t *supervisor_answer_pool(struct supervisor *supervisor, const json_t *request)
{
    const json_t *wish = json_object_get(request, "size");
    const char *text = json_string_value(wish);
    struct sizing sizing = supervisor->sizing;
    struct sizing_view view;
    struct error error;
    if (wish && !text)
        return refusal("size is a string: bytes (64G), a share of the free memory (80%) or auto");
    if (text && (look(supervisor, false, &view, &error) || sizing_set(&sizing, &view, text, &error)))
        return refusal(error.text);
    if (supervisor_change_holds(supervisor, request, sizing.target, &error))
        return refusal(error.text);
    if (text) {
        uint32_t before = supervisor->sizing.target;
        supervisor->sizing = sizing;
        supervisor->look_ms = 0;
        tell_iod(supervisor, before, "asked to");
    }
    json_t *pool = supervisor_pool_json(supervisor);
    json_object_set_new(pool, "held", supervisor_holds_json(supervisor));
    json_object_set_new(pool, "held_now", json_integer(atomic_load(&supervisor->control->iod.held)));
    json_object_set_new(pool, "hottest", hottest_json(supervisor));
    return json_pack("{s:b, s:o}", "ok", 1, "pool", pool);
}
