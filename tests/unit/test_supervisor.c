/* What the supervisor decides before and while it keeps processes: limits of control groups, cores, sizes, states,
 * restarts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "cmd/supervisor/child.h"
#include "cmd/supervisor/machine.h"
#include "cmd/supervisor/placement.h"
#include "cmd/supervisor/plan.h"

/* ---- a made-up /proc and /sys ---- */

struct tree {
    char root[64];
};

static int make_tree(void **state)
{
    struct tree *tree = calloc(1, sizeof *tree);
    strcpy(tree->root, "/tmp/calypte-test.XXXXXX");
    *state = tree;
    return mkdtemp(tree->root) ? 0 : -1;
}

static int remove_tree(void **state)
{
    struct tree *tree = *state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", tree->root);
    int status = system(command);
    free(tree);
    return status;
}

static void write_file(const struct tree *tree, const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s", tree->root, path);
    for (char *slash = strchr(full + strlen(tree->root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void test_machine(void **state)
{
    const struct tree *tree = *state;
    struct machine machine;
    struct error error;
    assert_int_equal(machine_read("", &machine, &error), 0);
    uint16_t cpu = machine.nodes[0].cpus[0];
    machine_free(&machine);

    char list[32];
    snprintf(list, sizeof list, "%u\n", cpu);
    write_file(tree, "/proc/meminfo", "MemTotal: 9999 kB\nMemAvailable:    1000 kB\n");
    write_file(tree, "/sys/devices/system/node/node2/cpulist", list);
    write_file(tree, "/sys/devices/system/node/node2/meminfo", "Node 2 MemTotal:   500 kB\n");
    write_file(tree, "/sys/devices/system/node/node3/cpulist", list); /* no memory */
    write_file(tree, "/sys/devices/system/node/node3/meminfo", "Node 3 MemTotal:   0 kB\n");
    write_file(tree, "/sys/devices/system/node/node4/cpulist", "\n"); /* memory, no CPU */
    write_file(tree, "/sys/devices/system/node/node4/meminfo", "Node 4 MemTotal:   500 kB\n");
    write_file(tree, "/proc/self/cgroup", "0::/\n");
    write_file(tree, "/proc/self/mountinfo", "31 23 0:28 / /cg rw - cgroup2 cgroup2 rw\n");
    write_file(tree, "/cg/cpu.max", "50000 100000\n");
    assert_int_equal(machine_read(tree->root, &machine, &error), 0);
    assert_int_equal(machine.node_count, 1);
    assert_int_equal(machine.nodes[0].id, 2);
    assert_int_equal(machine.nodes[0].cpu_count, 1);
    assert_int_equal(machine.cpu_budget, 1); /* half a CPU is still one thread */
    assert_int_equal(machine.memory_available, 1000 * 1024);
    machine_free(&machine);
}

static void test_cpu_list(void **state)
{
    uint16_t cpus[MACHINE_MAX_CPUS];
    (void)state;
    assert_int_equal(cpu_list_parse("0-3,8,10-11\n", cpus), 7);
    assert_int_equal(cpus[4], 8);
    assert_int_equal(cpus[6], 11);
    assert_int_equal(cpu_list_parse("\n", cpus), 0);
    assert_int_equal(cpu_list_parse("0-99999999999999999999", cpus), MACHINE_MAX_CPUS);
    static const char *const bad[] = {"a", "3-1", "1,1", "2,1", "1-", "-1", "1;2", "1,,2"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(cpu_list_parse(bad[i], cpus), -EINVAL);
}

/* ---- placement ---- */

/* A machine of `nodes` nodes with `cpus` CPUs each, numbered on. */
static struct machine made_machine(uint32_t nodes, uint32_t cpus)
{
    struct machine machine = {.cpu_count = nodes * cpus,
                              .cpu_budget = nodes * cpus,
                              .node_count = nodes,
                              .nodes = calloc(nodes, sizeof *machine.nodes),
                              .memory_available = UINT64_C(64) << 30,
                              .shm_free = UINT64_C(32) << 30};
    for (uint32_t n = 0; n < nodes; n++) {
        machine.nodes[n].id = n;
        machine.nodes[n].cpu_count = cpus;
        for (uint32_t c = 0; c < cpus; c++)
            machine.nodes[n].cpus[c] = (uint16_t)(n * cpus + c);
    }
    return machine;
}

/* True if no core belongs to two workers. */
static bool disjoint(const struct facts *facts)
{
    bool seen[MAX_CORES] = {false};
    for (uint32_t w = 0; w < facts->workers; w++)
        for (uint32_t c = 0; c < facts->core_count[w]; c++) {
            if (seen[facts->cores[w][c]])
                return false;
            seen[facts->cores[w][c]] = true;
        }
    return true;
}

static void test_placement(void **state)
{
    static const struct {
        uint32_t nodes, cpus, budget, workers, threads; /* budget 0: all */
        uint32_t want_workers, want_threads, want_nodes, want_spin;
        bool want_disjoint;
    } cases[] = {
        {1, 2, 0, 0, 0, 1, 2, 1, 1, true},   {1, 2, 0, 2, 0, 2, 1, 1, 1, true},   {1, 2, 0, 3, 0, 3, 1, 1, 0, false},
        {1, 2, 0, 8, 2, 8, 2, 1, 0, false},  {2, 64, 0, 0, 0, 2, 64, 2, 1, true}, {2, 64, 0, 1, 0, 1, 128, 2, 1, true},
        {2, 64, 0, 8, 0, 8, 16, 2, 1, true}, {3, 4, 0, 0, 0, 3, 4, 2, 1, true},   {6, 8, 0, 0, 0, 6, 8, 4, 1, true},
        {12, 4, 0, 0, 0, 8, 4, 8, 1, true},  {2, 8, 4, 0, 0, 2, 2, 2, 1, true},   {1, 16, 3, 2, 0, 2, 1, 1, 1, true},
        {1, 16, 3, 2, 2, 2, 2, 1, 0, true},  {2, 4, 0, 3, 0, 3, 2, 2, 1, true},   {1, 4, 1, 2, 0, 2, 1, 1, 0, true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct machine machine = made_machine(cases[i].nodes, cases[i].cpus);
        struct facts *facts = calloc(1, sizeof *facts);
        struct error error;
        if (cases[i].budget)
            machine.cpu_budget = cases[i].budget;
        assert_int_equal(placement_fill(&machine, cases[i].workers, cases[i].threads, facts, &error), 0);
        assert_int_equal(facts->workers, cases[i].want_workers);
        assert_int_equal(facts->threads, cases[i].want_threads);
        assert_int_equal(facts->nodes, cases[i].want_nodes);
        assert_int_equal(facts->spin, cases[i].want_spin);
        assert_int_equal(disjoint(facts), cases[i].want_disjoint);
        for (uint32_t w = 0; w < facts->workers; w++) {
            assert_true(facts->core_count[w] >= 1);
            assert_true(facts->worker_node[w] < facts->nodes);
        }
        free(facts);
        machine_free(&machine);
    }
}

static void test_placement_refuses(void **state)
{
    struct machine machine = made_machine(1, 2);
    struct facts *facts = calloc(1, sizeof *facts);
    struct error error;
    (void)state;
    assert_int_equal(placement_fill(&machine, 9, 0, facts, &error), -EINVAL);
    assert_non_null(strstr(error.text, "workers=9"));
    free(facts);
    machine_free(&machine);
}

/* ---- plan ---- */

#define SLICE 8192u
#define SLOT_BYTES (8u * SLICE)

static struct container made_container(void)
{
    static char path[] = "/models/made-up";
    struct container container = {.path = path,
                                  .identity = 7,
                                  .stripes = 1,
                                  .dense_format = WEIGHT_INT8,
                                  .expert_format = WEIGHT_INT4,
                                  .slice_bytes = SLICE,
                                  .expert_count = 4};
    container.config = (struct model_config){.hidden = 256,
                                             .layers = 5,
                                             .heads = 4,
                                             .vocab = 4096,
                                             .max_positions = 4096,
                                             .q_lora = 128,
                                             .kv_lora = 128,
                                             .qk_nope = 64,
                                             .qk_rope = 32,
                                             .v_head = 64,
                                             .index_topk = 64,
                                             .index_heads = 4,
                                             .index_dim = 64,
                                             .experts = 32,
                                             .top_k = 4,
                                             .shared_experts = 1,
                                             .expert_width = 128,
                                             .dense_width = 512};
    return container;
}

static int make_plan(const char *name, const char *value, const struct machine *machine, struct plan *ret_plan,
                     struct error *ret_error)
{
    struct settings settings;
    struct container container = made_container();
    settings_init(&settings);
    if (name)
        assert_int_equal(settings_set(&settings, name, value, SOURCE_FLAG, "--set", ret_error), 0);
    return plan_make(&settings, &container, machine, ret_plan, ret_error);
}

static void test_plan_sizes(void **state)
{
    struct machine machine = made_machine(1, 2);
    struct plan *plan = calloc(1, sizeof *plan);
    struct error error;
    (void)state;
    assert_int_equal(make_plan(NULL, NULL, &machine, plan, &error), 0);
    assert_int_equal(plan->pool_slots, 128); /* there is room for all experts, and for no more */
    assert_int_equal(plan->facts.context, 4096);
    assert_int_equal(plan->facts.kv_pages, 64);
    assert_int_equal(plan->facts.index_topk, 64);
    assert_int_equal(plan->facts.max_rows, 256);
    assert_int_equal(plan->pool_bytes, 128 * SLOT_BYTES);
    free(plan);
    machine_free(&machine);
}

static void test_plan_pool(void **state)
{
    struct machine machine = made_machine(1, 2);
    struct plan *plan = calloc(1, sizeof *plan);
    struct error error;
    char text[64];
    (void)state;
    snprintf(text, sizeof text, "%u", 4 * SLOT_BYTES);
    assert_int_equal(make_plan("pool", text, &machine, plan, &error), 0);
    assert_int_equal(plan->pool_slots, 4);
    snprintf(text, sizeof text, "%u", 5 * SLOT_BYTES - 1);
    assert_int_equal(make_plan("pool", text, &machine, plan, &error), 0);
    assert_int_equal(plan->pool_slots, 4);
    snprintf(text, sizeof text, "%u", 4 * SLOT_BYTES - 1);
    assert_int_equal(make_plan("pool", text, &machine, plan, &error), -EINVAL);
    snprintf(text, sizeof text, "at least %u bytes", 4 * SLOT_BYTES);
    assert_non_null(strstr(error.text, text));
    assert_int_equal(make_plan("pool", "1T", &machine, plan, &error), 0);
    assert_int_equal(plan->pool_slots, 128);

    /* 2 % of the available memory */
    machine.memory_available = 100 * UINT64_C(20) * SLOT_BYTES;
    assert_int_equal(make_plan("pool", "2%", &machine, plan, &error), 0);
    assert_int_equal(plan->pool_slots, 40);
    free(plan);
    machine_free(&machine);
}

static void test_plan_room(void **state)
{
    struct machine machine = made_machine(1, 2);
    struct plan *plan = calloc(1, sizeof *plan);
    struct error error;
    (void)state;
    assert_int_equal(make_plan(NULL, NULL, &machine, plan, &error), 0);
    uint64_t fixed =
        plan->dense_bytes + plan->kv_bytes + plan->exchange_bytes + plan->table_bytes + sizeof(struct control);

    /* A /dev/shm with room for all but some experts: they are left out. */
    machine.shm_free = fixed + 20 * SLOT_BYTES;
    assert_int_equal(make_plan(NULL, NULL, &machine, plan, &error), 0);
    assert_int_equal(plan->pool_slots, 20);
    /* ... with room for too few: refused, with the numbers and the remedy. */
    machine.shm_free = fixed + 3 * SLOT_BYTES;
    assert_int_equal(make_plan(NULL, NULL, &machine, plan, &error), -ENOSPC);
    assert_non_null(strstr(error.text, "/dev/shm has "));
    assert_non_null(strstr(error.text, "smaller --context or --slots")); /* the pool is the smallest already */
    assert_int_equal(make_plan("pool", "1G", &machine, plan, &error), -ENOSPC);
    assert_null(strstr(error.text, "--pool"));
    machine.shm_free = fixed + 5 * SLOT_BYTES;
    assert_int_equal(make_plan("pool", "1G", &machine, plan, &error), -ENOSPC);
    assert_non_null(strstr(error.text, "smaller --pool, --context or --slots"));
    machine.shm_free = plan->dense_bytes;
    assert_int_equal(make_plan(NULL, NULL, &machine, plan, &error), -ENOSPC);
    assert_null(strstr(error.text, "smaller"));
    assert_non_null(strstr(error.text, ": enlarge it"));
    machine.shm_free = UINT64_C(32) << 30;
    machine.memory_available = fixed;
    assert_int_equal(make_plan(NULL, NULL, &machine, plan, &error), -ENOMEM);
    assert_non_null(strstr(error.text, "memory has "));
    assert_int_equal(make_plan("context", "4097", &machine, plan, &error), -EINVAL);
    free(plan);
    machine_free(&machine);
}

/* ---- children ---- */

static void expect_step(enum child_state from, enum child_event event, enum child_state to, enum child_action action)
{
    struct child_transition next = child_next(from, event);
    assert_int_equal(next.state, to);
    assert_int_equal(next.action, action);
}

static void test_child_states(void **state)
{
    (void)state;
    expect_step(CHILD_DOWN, EVENT_START, CHILD_STARTING, ACTION_SPAWN);
    expect_step(CHILD_STARTING, EVENT_READY, CHILD_READY, ACTION_NONE);
    expect_step(CHILD_READY, EVENT_EXIT, CHILD_DEAD, ACTION_RECOVER);
    expect_step(CHILD_DEAD, EVENT_CLEARED, CHILD_WAITING, ACTION_NONE);
    expect_step(CHILD_WAITING, EVENT_DUE, CHILD_STARTING, ACTION_SPAWN);
    expect_step(CHILD_READY, EVENT_STALLED, CHILD_READY, ACTION_KILL);
    expect_step(CHILD_READY, EVENT_STOP, CHILD_STOPPING, ACTION_TERMINATE);
    expect_step(CHILD_STOPPING, EVENT_DUE, CHILD_STOPPING, ACTION_KILL);
    expect_step(CHILD_STOPPING, EVENT_EXIT, CHILD_DOWN, ACTION_NONE);
    /* Stopping wins over everything: from every state the next stops lead to DOWN, and nothing is started again. */
    for (int from = 0; from < CHILD_STATES; from++) {
        struct child_transition stop = child_next((enum child_state)from, EVENT_STOP);
        struct child_transition end = child_next(stop.state, EVENT_EXIT);
        assert_int_equal(end.state, CHILD_DOWN);
        assert_true(stop.action != ACTION_SPAWN && end.action != ACTION_SPAWN && end.action != ACTION_RECOVER);
    }
    /* A dead process is not started before its traces are gone. */
    expect_step(CHILD_DEAD, EVENT_DUE, CHILD_DEAD, ACTION_NONE);
    expect_step(CHILD_DEAD, EVENT_START, CHILD_DEAD, ACTION_NONE);
}

static void test_restart_law(void **state)
{
    int before = -1;
    (void)state;
    assert_int_equal(restart_delay_ms(0), 0);
    assert_int_equal(restart_delay_ms(1), 0);
    assert_int_equal(restart_delay_ms(2), RESTART_FIRST_MS);
    assert_int_equal(restart_delay_ms(3), 2 * RESTART_FIRST_MS);
    for (uint32_t quick = 0; quick < 100; quick++) {
        assert_true(restart_delay_ms(quick) >= before && restart_delay_ms(quick) <= RESTART_LONGEST_MS);
        before = restart_delay_ms(quick);
    }
    assert_int_equal(before, RESTART_LONGEST_MS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_machine, make_tree, remove_tree),
        cmocka_unit_test(test_cpu_list),
        cmocka_unit_test(test_placement),
        cmocka_unit_test(test_placement_refuses),
        cmocka_unit_test(test_plan_sizes),
        cmocka_unit_test(test_plan_pool),
        cmocka_unit_test(test_plan_room),
        cmocka_unit_test(test_child_states),
        cmocka_unit_test(test_restart_law),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
