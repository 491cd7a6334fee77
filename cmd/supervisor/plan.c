#include "cmd/supervisor/plan.h"

#include "cmd/supervisor/placement.h"
#include "proto/bytes_text.h"
#include "proto/cleanup.h"
#include "proto/model_config.h"
#include "shm/exchange.h"
#include "shm/kv.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define CONTEXT_DEFAULT 8192u
#define LOGIT_BYTES                                                                                                    \
    (UINT64_C(64) << 20) /* logits that one STEP may ask for, so that scoring a large vocabulary stays small */
#define RESERVE_LEAST (UINT64_C(256) << 20)
#define RESERVE_MOST (UINT64_C(8) << 30)

/* What the processes themselves need beside shared memory (row buffers, tokenizer, stacks), and the rest of the
 * machine. */
static uint64_t reserve(uint64_t available)
{
    uint64_t share = available / 16;
    return share < RESERVE_LEAST ? RESERVE_LEAST : share > RESERVE_MOST ? RESERVE_MOST : share;
}

static uint64_t dense_bytes(const struct container *container)
{
    uint64_t bytes = 1 << 20; /* header, and rounding of the segment */
    for (size_t f = 0; f < container->dense_count; f++) {
        const struct safetensors *file = &container->dense[f].header;
        bytes += file->file_bytes - file->data_offset + file->count * (sizeof(struct tensor) + DISK_ALIGN);
    }
    return bytes + (uint64_t)container->expert_count * container->config.experts * EXPERT_MATRICES * sizeof(int32_t);
}

static int fill_context(const struct settings *settings, struct facts *facts, struct error *ret_error)
{
    uint64_t most = facts->config.max_positions, wanted = settings_number(settings, SETTING_CONTEXT);
    if (wanted > most)
        return error_set(ret_error, EINVAL, "context=%" PRIu64 " is more than the model's %" PRIu64 " positions",
                         wanted, most);
    facts->context = (uint32_t)(wanted ? wanted : most < CONTEXT_DEFAULT ? most : CONTEXT_DEFAULT);
    facts->slots = (uint32_t)settings_number(settings, SETTING_SLOTS);
    facts->queue = (uint32_t)settings_number(settings, SETTING_QUEUE);
    facts->prefill_chunk = (uint32_t)settings_number(settings, SETTING_PREFILL_CHUNK);
    facts->max_rows = facts->prefill_chunk > facts->slots ? facts->prefill_chunk : facts->slots;
    uint64_t rows = LOGIT_BYTES / ((uint64_t)facts->config.vocab * sizeof(float));
    rows = rows < facts->max_rows ? rows : facts->max_rows;
    facts->logit_rows = (uint32_t)(rows > facts->slots ? rows : facts->slots);
    facts->page_tokens = KV_PAGE_TOKENS;
    facts->kv_pages = facts->slots * ((facts->context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS);
    return 0;
}

/* A mirror that does not open is iod's to tell: the instance starts without it, unless the command line named it
 * (cmd/cli/launch.c). */
static int fill_mirror(const struct settings *settings, struct facts *facts, struct error *ret_error)
{
    const char *text = settings_text(settings, SETTING_MIRROR);
    if (!text[0])
        return 0;
    _cleanup_free_ char *path = realpath(text, NULL), *here = path ? NULL : getcwd(NULL, 0);
    bool relative = !path && text[0] != '/' && here;
    int length = snprintf(facts->mirror, sizeof facts->mirror, "%s%s%s", relative ? here : "", relative ? "/" : "",
                          path ? path : text);
    if ((size_t)length >= sizeof facts->mirror)
        return error_set(ret_error, ENAMETOOLONG, "mirror %.100s...: the path is too long, %zu bytes are allowed", text,
                         sizeof facts->mirror - 1);
    return facts->mirror[0] == '/' ? 0 : error_set(ret_error, EINVAL, "mirror %s: give an absolute path", text);
}

static int fill_facts(const struct settings *settings, const struct container *container, const struct machine *machine,
                      struct facts *facts, struct error *ret_error)
{
    *facts = (struct facts){.config = container->config,
                            .identity = container->identity,
                            .stripes = container->stripes,
                            .dense_format = container->dense_format,
                            .expert_format = container->expert_format};
    if (strlen(container->path) >= sizeof facts->container)
        return error_set(ret_error, ENAMETOOLONG, "%s: the path is too long, %zu bytes are allowed", container->path,
                         sizeof facts->container - 1);
    strcpy(facts->container, container->path);
    facts->activations =
        settings_number(settings, SETTING_ACTIVATIONS) == SETTING_ACTIVATIONS_F32 ? ACTIVATIONS_F32 : ACTIVATIONS_INT8;
    facts->kv = settings_number(settings, SETTING_KV) == SETTING_KV_F32 ? KV_F32 : KV_F16;
    switch ((enum setting_io)settings_number(settings, SETTING_IO)) {
    case SETTING_IO_URING: facts->io = IO_URING; break;
    case SETTING_IO_PREAD: facts->io = IO_PREAD; break;
    case SETTING_IO_AUTO: facts->io = IO_AUTO; break;
    }
    facts->isa = (uint32_t)settings_number(settings, SETTING_ISA);
    facts->hugepages = settings_number(settings, SETTING_HUGEPAGES) != SETTING_HUGEPAGES_OFF;
    facts->verify = (uint32_t)settings_number(settings, SETTING_VERIFY);
    facts->prefetch = (uint32_t)settings_number(settings, SETTING_PREFETCH);
    facts->learning = (uint32_t)settings_number(settings, SETTING_LEARNING);
    int status = fill_mirror(settings, facts, ret_error);
    if (status)
        return status;
    uint64_t topk = settings_number(settings, SETTING_INDEX_TOPK);
    facts->index_topk = topk ? (uint32_t)topk : facts->config.index_topk;
    status = fill_context(settings, facts, ret_error);
    return status ? status
                  : placement_fill(machine, (uint32_t)settings_number(settings, SETTING_WORKERS),
                                   (uint32_t)settings_number(settings, SETTING_THREADS), facts, ret_error);
}

uint64_t plan_fixed_bytes(const struct plan *plan)
{
    return plan->dense_bytes + plan->kv_bytes + plan->exchange_bytes + plan->table_bytes + sizeof(struct control);
}

uint32_t plan_least_slots(const struct plan *plan)
{
    uint32_t least = 2 * plan->facts.config.top_k;
    return least < plan->pool.slots ? least : plan->pool.slots;
}

/* What could be chosen smaller: nothing where the weights, tables and the smallest pool are too much already. */
static const char *smaller(const struct plan *plan, uint64_t pool_bytes, uint64_t room)
{
    uint64_t least = plan->facts.config.top_k * plan->slot_bytes;
    if (plan->dense_bytes + plan->table_bytes + sizeof(struct control) + least > room)
        return "";
    return pool_bytes > least ? "choose a smaller --pool, --context or --slots, or "
                              : "choose a smaller --context or --slots, or ";
}

static int refuse(const struct plan *plan, uint64_t pool_bytes, uint64_t room, int code, const char *where,
                  const char *remedy, struct error *ret_error)
{
    return error_set(ret_error, code,
                     "%s has %s free and the instance needs %s (dense weights %s, KV %s, exchange %s, tables %s, pool "
                     "%s): %s%s",
                     where, bytes_text(room).text, bytes_text(plan_fixed_bytes(plan) + pool_bytes).text,
                     bytes_text(plan->dense_bytes).text, bytes_text(plan->kv_bytes).text,
                     bytes_text(plan->exchange_bytes).text, bytes_text(plan->table_bytes + sizeof(struct control)).text,
                     bytes_text(pool_bytes).text, smaller(plan, pool_bytes, room), remedy);
}

static int check_room(const struct plan *plan, uint64_t pool_bytes, const struct machine *machine,
                      struct error *ret_error)
{
    uint64_t needed = plan_fixed_bytes(plan) + pool_bytes;
    if (needed > machine->memory_available)
        return refuse(plan, pool_bytes, machine->memory_available, ENOMEM, "memory",
                      "end other programs, or raise the memory limit of this control group", ret_error);
    if (needed > machine->shm_free)
        return refuse(plan, pool_bytes, machine->shm_free, ENOSPC, "/dev/shm",
                      "enlarge it (mount -o remount,size=SIZE /dev/shm)", ret_error);
    return 0;
}

static int fill_pool(const struct settings *settings, const struct container *container, const struct machine *machine,
                     struct plan *plan, struct error *ret_error)
{
    uint64_t slot_bytes = (uint64_t)container->slice_bytes * EXPERT_SLICES;
    uint64_t all = (uint64_t)container->expert_count * container->config.experts, top_k = container->config.top_k;
    plan->pool = (struct pool_shape){.slots = (uint32_t)all,
                                     .nodes = plan->facts.nodes,
                                     .moe_layers = (uint32_t)container->expert_count,
                                     .experts = container->config.experts,
                                     .slice_bytes = container->slice_bytes};
    plan->facts.pool_slots = plan->pool.slots; /* the table has room for all, so that the pool may grow */
    plan->table_bytes = pool_table_bytes(&plan->pool);
    plan->slot_bytes = slot_bytes;
    int status = check_room(plan, top_k * slot_bytes, machine, ret_error);
    if (status)
        return status;

    uint64_t memory = machine->memory_available;
    plan->reserve = reserve(memory);
    uint64_t free_memory = memory > plan->reserve ? memory - plan->reserve : 0;
    uint64_t room = free_memory < machine->shm_free ? free_memory : machine->shm_free;
    uint64_t automatic = room > plan_fixed_bytes(plan) ? room - plan_fixed_bytes(plan) : 0;
    /* Memory that is scarcer than the reserve asks for: top_k slots fit, as just checked, and some more if they do. */
    uint64_t some = plan_least_slots(plan) * slot_bytes;
    if (automatic < some)
        automatic = check_room(plan, some, machine, NULL) ? top_k * slot_bytes : some;
    uint64_t slots = settings_share(settings, SETTING_POOL, memory, automatic) / slot_bytes;
    if (slots < top_k)
        return error_set(ret_error, EINVAL,
                         "pool=%s holds %" PRIu64 " expert%s of %" PRIu64 " bytes, and a layer needs %" PRIu64
                         " at once: give it at least %" PRIu64 " bytes (--pool %" PRIu64 ")",
                         settings_text(settings, SETTING_POOL), slots, slots == 1 ? "" : "s", slot_bytes, top_k,
                         top_k * slot_bytes, top_k * slot_bytes);
    plan->automatic = !strcmp(settings_text(settings, SETTING_POOL), "auto");
    plan->pool_slots = (uint32_t)(slots < all ? slots : all);
    plan->pool_bytes = plan->pool_slots * slot_bytes;
    return check_room(plan, plan->pool_bytes, machine, ret_error);
}

int plan_make(const struct settings *settings, const struct container *container, const struct machine *machine,
              struct plan *ret_plan, struct error *ret_error)
{
    struct kv_layout kv;
    struct exchange_layout exchange;
    *ret_plan = (struct plan){.dense_bytes = dense_bytes(container)};
    int status = fill_facts(settings, container, machine, &ret_plan->facts, ret_error);
    if (status)
        return status;
    kv_layout(&ret_plan->facts, &kv);
    exchange_layout(&ret_plan->facts, &exchange);
    ret_plan->kv_bytes = kv.segment_bytes;
    ret_plan->exchange_bytes = exchange.segment_bytes;
    return fill_pool(settings, container, machine, ret_plan, ret_error);
}
