/* The answering side of REQ/REP: clients that keep to the protocol, in any pieces, and all kinds that do not. */
#include "proto/cleanup.h"
#include "proto/reply_socket.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#define MOST 100000u
#define GREETING "\0SP\0\0\x30\0\0"

struct fixture {
    char folder[64], path[128];
    struct reply_socket *socket;
};

static int set_up(void **state)
{
    struct fixture *fixture = calloc(1, sizeof *fixture);
    struct error error;
    assert_non_null(fixture);
    strcpy(fixture->folder, "/tmp/calypte-reply-XXXXXX");
    assert_non_null(mkdtemp(fixture->folder));
    snprintf(fixture->path, sizeof fixture->path, "%s/socket", fixture->folder);
    assert_int_equal(reply_socket_listen(SP_REP, fixture->path, MOST, &fixture->socket, &error), 0);
    *state = fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    reply_socket_close(fixture->socket);
    assert_int_equal(rmdir(fixture->folder), 0);
    free(fixture);
    return 0;
}

static int dial(const struct fixture *fixture, const void *bytes, size_t size)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, fixture->path, strlen(fixture->path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&address, sizeof address), 0);
    if (size > 0)
        assert_int_equal(send(fd, bytes, size, MSG_NOSIGNAL), size);
    return fd;
}

static bool readable(int fd)
{
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    return poll(&poll_fd, 1, 0) == 1;
}

static size_t descriptors(void)
{
    size_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    assert_non_null(folder);
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

/* Takes everything that there is: ends of connections only. */
static void settle(struct fixture *fixture)
{
    struct reply_address from;
    void *bytes = NULL;
    size_t size;
    while (readable(reply_socket_fd(fixture->socket)))
        while (reply_socket_receive(fixture->socket, &from, &bytes, &size) == 0)
            assert_null(bytes);
}

/* A frame with a request: id, body. */
static size_t frame(unsigned char *to, uint32_t id, const char *body)
{
    size_t length = strlen(body) + 4;
    memset(to, 0, 9);
    to[0] = 1;
    to[7] = (unsigned char)(length >> 8);
    to[8] = (unsigned char)length;
    to[9] = (unsigned char)(0x80 | id >> 24);
    to[10] = (unsigned char)(id >> 16);
    to[11] = (unsigned char)(id >> 8);
    to[12] = (unsigned char)id;
    memcpy(to + 13, body, strlen(body));
    return 13 + strlen(body);
}

static void expect_request(struct fixture *fixture, const char *body, struct reply_address *ret_from)
{
    _cleanup_free_ void *bytes = NULL;
    size_t size;
    assert_int_equal(reply_socket_receive(fixture->socket, ret_from, &bytes, &size), 0);
    assert_non_null(bytes);
    assert_int_equal(size, strlen(body));
    assert_memory_equal(bytes, body, size);
}

static void expect_answer(int fd, uint32_t id, const char *body, bool greeting)
{
    unsigned char got[256], expected[256];
    size_t length = frame(expected, id, body);
    if (greeting) {
        assert_int_equal(recv(fd, got, 8, MSG_WAITALL), 8);
        assert_memory_equal(got, "\0SP\0\0\x31\0\0", 8);
    }
    assert_int_equal(recv(fd, got, length, MSG_WAITALL), length);
    assert_memory_equal(got, expected, length);
}

/* A request that comes byte by byte, two at once, and answers in another order. */
static void test_pieces(void **state)
{
    struct fixture *fixture = *state;
    unsigned char bytes[256];
    memcpy(bytes, GREETING, 8);
    size_t length = 8 + frame(bytes + 8, 7, "one");
    int fd = dial(fixture, NULL, 0);
    for (size_t i = 0; i < length; i++) {
        settle(fixture);
        assert_int_equal(send(fd, bytes + i, 1, 0), 1);
    }
    struct reply_address one, two;
    expect_request(fixture, "one", &one);
    length = frame(bytes, 8, "two");
    length += frame(bytes + length, 9, "");
    assert_int_equal(send(fd, bytes, length, 0), length);
    expect_request(fixture, "two", &two);
    struct reply_address three;
    expect_request(fixture, "", &three);
    reply_socket_send(fixture->socket, &two, "2", 1);
    reply_socket_send(fixture->socket, &one, "1", 1);
    expect_answer(fd, 8, "2", true);
    expect_answer(fd, 7, "1", false);
    /* a hop before the id belongs to the header, and comes back */
    static const unsigned char hop[] = {1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 5, 0x80, 0, 0, 6, 'x'};
    assert_int_equal(send(fd, hop, sizeof hop, 0), sizeof hop);
    expect_request(fixture, "x", &one);
    reply_socket_send(fixture->socket, &one, "x", 1);
    assert_int_equal(recv(fd, bytes, sizeof hop, MSG_WAITALL), sizeof hop);
    assert_memory_equal(bytes, hop, sizeof hop);
    close(fd);
    void *none = bytes;
    size_t size;
    assert_int_equal(reply_socket_receive(fixture->socket, &two, &none, &size), 0);
    assert_null(none);
    assert_int_equal(two.connection, one.connection);
    reply_socket_send(fixture->socket, &three, "late", 4); /* to nobody */
}

/* Clients that go at any moment or do not speak the protocol leave nothing, and the next one is served. */
static void test_bad_clients(void **state)
{
    struct fixture *fixture = *state;
    static const struct {
        const char *bytes;
        size_t size;
        bool refused; /* or merely not whole */
    } cases[] = {
        {"", 0, false},
        {GREETING, 3, false},
        {GREETING, 8, false},
        {"GET / HTTP/1.0\r\n\r\n", 18, true},
        {"\0SP\0\0\x31\0\0", 8, true},
        {GREETING "\2\0\0\0\0\0\0\0\5", 17, true},                 /* no message */
        {GREETING "\1\xff\xff\xff\xff\xff\xff\xff\xff", 17, true}, /* 2^64 - 1 bytes */
        {GREETING "\1\0\0\0\0\0\2\0\0", 17, true},                 /* more than MOST */
        {GREETING "\1\0\0\0\0\0\0\0\0", 17, true},                 /* no request id */
        {GREETING "\1\0\0\0\0\0\0\0\7\0\0\0\1abc", 24, true},      /* a hop, no id */
        {GREETING "\1\0\0\0\0\0\1\0\0\x80\0\0\1abc", 24, false},   /* a beginning */
    };
    size_t before = descriptors();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        close(dial(fixture, cases[i].bytes, cases[i].size)); /* gone before it is accepted */
        settle(fixture);
        assert_int_equal(descriptors(), before);
        int fd = dial(fixture, cases[i].bytes, cases[i].size);
        settle(fixture); /* which asserts that nothing makes the descriptor readable for ever */
        assert_int_equal(descriptors(), before + (cases[i].refused ? 1 : 2));
        close(fd);
        settle(fixture);
        assert_int_equal(descriptors(), before);
    }
    unsigned char bytes[64];
    memcpy(bytes, GREETING, 8);
    size_t length = 8 + frame(bytes + 8, 1, "x");
    int fd = dial(fixture, bytes, length);
    struct reply_address from;
    expect_request(fixture, "x", &from);
    close(fd);
}

/* Connections without end: those that ask nothing make room, those that wait for an answer stay. */
static void test_crowd(void **state)
{
    struct fixture *fixture = *state;
    unsigned char bytes[64];
    memcpy(bytes, GREETING, 8);
    size_t length = 8 + frame(bytes + 8, 1, "x");
    int waiting = dial(fixture, bytes, length);
    struct reply_address from;
    expect_request(fixture, "x", &from);
    int fds[600];
    for (size_t i = 0; i < 600; i++) {
        fds[i] = dial(fixture, GREETING, 8);
        settle(fixture);
    }
    reply_socket_send(fixture->socket, &from, "y", 1);
    expect_answer(waiting, 1, "y", true);
    close(waiting);
    for (size_t i = 0; i < 600; i++)
        close(fds[i]);
    settle(fixture);
}

/* No descriptor is left for a new connection: an old silent one is given up for it, and nothing spins. */
static void test_no_descriptors(void **state)
{
    struct fixture *fixture = *state;
    int silent = dial(fixture, GREETING, 8);
    settle(fixture);
    unsigned char bytes[64];
    memcpy(bytes, GREETING, 8);
    size_t length = 8 + frame(bytes + 8, 1, "x");
    int asking = dial(fixture, bytes, length);
    struct rlimit limit, none;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    none = limit;
    none.rlim_cur = (rlim_t)asking + 1;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    struct reply_address from;
    expect_request(fixture, "x", &from);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    close(silent);
    close(asking);
}

/* A client that reads no answers: nobody waits for it, and what is kept for it has a limit. */
static void test_reads_nothing(void **state)
{
    struct fixture *fixture = *state;
    static char answer[60000];
    unsigned char bytes[64];
    int fd = dial(fixture, GREETING, 8);
    size_t length = frame(bytes, 1, "x"), answered = 0;
    for (int i = 0; i < 200; i++) {
        if (send(fd, bytes, length, MSG_DONTWAIT) != (ssize_t)length)
            break;
        struct reply_address from;
        _cleanup_free_ void *request = NULL;
        size_t size;
        if (reply_socket_receive(fixture->socket, &from, &request, &size) == 0) {
            reply_socket_send(fixture->socket, &from, answer, sizeof answer);
            answered++;
        }
    }
    assert_in_range(answered, 10, 40); /* the socket's buffer and 1 MiB */
    assert_false(readable(reply_socket_fd(fixture->socket)));
    close(fd);
    settle(fixture);
}

/* Closing: a client that has asked again and reads late has its answer, whole, and then the end. */
static void test_last_answer(void **state)
{
    struct fixture *fixture = *state;
    static char answer[900000], got[1000000];
    unsigned char bytes[64];
    struct reply_address from;
    void *request;
    size_t size, length = frame(bytes, 1, "x"), read = 0;
    int fd = dial(fixture, GREETING, 8), silent = dial(fixture, "", 0);
    assert_int_equal(send(fd, bytes, length, 0), length);
    while (reply_socket_receive(fixture->socket, &from, &request, &size) != 0 || !request)
        continue;
    free(request);
    memset(answer, 'a', sizeof answer);
    reply_socket_send(fixture->socket, &from, answer, sizeof answer);
    assert_int_equal(send(fd, bytes, length, 0), length); /* is never read */
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        usleep(100000); /* both are there: what it reads, and the end */
        struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
        ssize_t some = 1;
        while (some > 0 && poll(&poll_fd, 1, 5000) == 1 && !(poll_fd.revents & (POLLHUP | POLLERR)))
            if ((some = recv(fd, got + read, sizeof got - read, 0)) > 0)
                read += (size_t)some;
        _exit(read == 8 + 13 + sizeof answer && got[read - 1] == 'a' ? 0 : 1);
    }
    close(fd);
    reply_socket_close(fixture->socket);
    fixture->socket = NULL;
    close(silent);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    struct error error;
    assert_int_equal(reply_socket_listen(SP_REP, fixture->path, MOST, &fixture->socket, &error), 0);
}

static void test_place(void **state)
{
    struct fixture *fixture = *state;
    struct reply_socket *second;
    struct error error = {""};
    struct stat status;
    assert_int_equal(stat(fixture->path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    assert_int_equal(reply_socket_listen(SP_REP, fixture->path, MOST, &second, &error), -EADDRINUSE);
    assert_non_null(strstr(error.text, fixture->path));
    settle(fixture);
    reply_socket_close(fixture->socket);
    /* what a killed process leaves */
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, fixture->path, strlen(fixture->path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&address, sizeof address), 0);
    close(fd);
    assert_int_equal(reply_socket_listen(SP_REP, fixture->path, MOST, &fixture->socket, &error), 0);
}

/* A child that has just been forked holds every descriptor for a moment: a connection that was ended meanwhile is heard of no more. */
static void test_child_holds(void **state)
{
    struct fixture *fixture = *state;
    int client = dial(fixture, GREETING, 8);
    settle(fixture);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(5);
        pause();
        _exit(0);
    }
    assert_int_equal(send(client, "no frame begins so", 18, MSG_NOSIGNAL), 18);
    settle(fixture);
    assert_int_equal(send(client, "to whom it may concern", 22, MSG_NOSIGNAL), 22); /* the child's copy gets it */
    assert_false(readable(reply_socket_fd(fixture->socket)));
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, NULL, 0), child);
    close(client);
    settle(fixture);
}

#define REPLY_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        REPLY_TEST(test_pieces),         REPLY_TEST(test_bad_clients),   REPLY_TEST(test_crowd),
        REPLY_TEST(test_no_descriptors), REPLY_TEST(test_reads_nothing), REPLY_TEST(test_last_answer),
        REPLY_TEST(test_place),          REPLY_TEST(test_child_holds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
