/* See vmove_fork.h. A request is a line of JSON, and so is its answer. */
#define _POSIX_C_SOURCE 200809L

#include "vmove_fork.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* How long the port may be somebody else's, or nobody's on the host. */
#define PATIENCE_MS 10000
/* How long the host may be busy, and how soon it is asked again. It counts lines, and takes eight in a second. */
#define BUSY_MS 30000
#define BUSY_AGAIN_MS 500
/* How soon a port is tried again that cannot be waited for. */
#define AGAIN_MS 20
/* Read at once. */
#define CHUNK 16384
/* Values inside of values that are looked into; answers have three. */
#define MAX_DEPTH 64

#define NO_PORT "expected a virtio-serial port named " VMOVE_FORK_PORT ", found none: start the VM with one, and load virtio_console"
#define NOBODY_LISTENS "nobody on the host has listened for %d s: vmoved must run there, and the port's socket be {vmdir}/fork.sock"
#define LOST "the host let go of the port before it answered, as when vmoved restarts: whether it did what was asked is not known"

struct vmove_fork_port {
    int descriptor;
    /* Read, and not yet a line. */
    char *buffer;
    size_t length, room;
    char error[512];
};

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

__attribute__((format(printf, 3, 4))) static int fail(struct vmove_fork_port *port, int code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(port->error, sizeof port->error, format, values);
    va_end(values);
    return code;
}

/* JSON, as far as answers need it: */
static const char *past_space(const char *at) {
    while (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n')
        at++;
    return at;
}

/* Behind the string that begins at `at`; NULL if it has no end. */
static const char *past_string(const char *at) {
    if (*at != '"')
        return NULL;
    for (at++; *at != '"'; at++) {
        if (*at == '\\')
            at++;
        if (*at == '\0')
            return NULL;
    }
    return at + 1;
}

/* Behind the value that begins at `at`, or NULL. Well-formedness inside of numbers and words is the host's business. */
static const char *past_value(const char *at, int depth) {
    at = past_space(at);
    if (*at == '"')
        return past_string(at);
    if (*at != '{' && *at != '[') {
        size_t length = strcspn(at, ",]} \t\r\n");
        return length > 0 ? at + length : NULL;
    }
    char open = *at, close = open == '{' ? '}' : ']';
    at = past_space(at + 1);
    if (*at == close)
        return at + 1;
    if (depth >= MAX_DEPTH)
        return NULL;
    for (;;) {
        if (open == '{') {
            if ((at = past_string(past_space(at))) == NULL || *(at = past_space(at)) != ':')
                return NULL;
            at++;
        }
        if ((at = past_value(at, depth + 1)) == NULL)
            return NULL;
        at = past_space(at);
        if (*at == close)
            return at + 1;
        if (*at++ != ',')
            return NULL;
    }
}

/* The value of a name in the object that begins at `at`, or NULL. */
static const char *member(const char *at, const char *name) {
    size_t length = strlen(name);
    at = past_space(at);
    if (*at++ != '{')
        return NULL;
    for (;;) {
        const char *found = past_space(at), *end = past_string(found);
        if (end == NULL || *(at = past_space(end)) != ':')
            return NULL;
        at = past_space(at + 1);
        if ((size_t)(end - found) == length + 2 && memcmp(found + 1, name, length) == 0)
            return at;
        if ((at = past_value(at, 0)) == NULL || *(at = past_space(at)) != ',')
            return NULL;
        at++;
    }
}

static bool number(const char *at, unsigned *into) {
    if (at == NULL || *at < '0' || *at > '9')
        return false;
    char *end;
    unsigned long value = strtoul(at, &end, 10);
    *into = (unsigned)value;
    return value <= UINT32_MAX && strchr(",]} \t\r\n", *end) != NULL;
}

static int hex4(const char *at) {
    static const char digits[] = "0123456789abcdef";
    int value = 0;
    for (int i = 0; i < 4; i++) {
        const char *digit = at[i] != '\0' ? strchr(digits, tolower((unsigned char)at[i])) : NULL;
        if (digit == NULL)
            return -1;
        value = value * 16 + (int)(digit - digits);
    }
    return value;
}

static char *put_utf8(char *to, unsigned long c) {
    static const unsigned char marks[] = {0, 0xc0, 0xe0, 0xf0};
    int more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    *to++ = (char)(marks[more] | c >> 6 * more);
    while (more-- > 0)
        *to++ = (char)(0x80 | (c >> 6 * more & 0x3f));
    return to;
}

/* Reads the escape behind a backslash; gives what follows it, or NULL. */
static const char *unescaped(const char *at, char **to) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *name = *at != '\0' ? strchr(names, *at) : NULL;
    if (name != NULL) {
        *(*to)++ = values[name - names];
        return at + 1;
    }
    if (*at++ != 'u')
        return NULL;
    int first = hex4(at);
    if (first < 0)
        return NULL;
    at += 4;
    unsigned long c = (unsigned long)first;
    if (c >= 0xd800 && c < 0xdc00 && at[0] == '\\' && at[1] == 'u') {
        int second = hex4(at + 2);
        if (second >= 0xdc00 && second < 0xe000) {
            c = 0x10000 + ((c - 0xd800) << 10) + (unsigned long)(second - 0xdc00);
            at += 6;
        }
    }
    /* Half of a pair is no character. */
    *to = put_utf8(*to, c >= 0xd800 && c < 0xe000 ? 0xfffd : c);
    return at;
}

char *vmove_fork_text(const char *result) {
    const char *at = result != NULL ? past_space(result) : "", *end = past_string(at);
    if (end == NULL)
        return NULL;
    /* No escape is longer than what it stands for. */
    char *text = malloc((size_t)(end - at)), *to = text;
    if (text == NULL)
        return NULL;
    for (at++; at < end - 1;) {
        if (*at != '\\') {
            *to++ = *at++;
        } else if ((at = unescaped(at + 1, &to)) == NULL) {
            free(text);
            return NULL;
        }
    }
    *to = '\0';
    return text;
}

/* The text as a JSON string, to be freed. */
static char *quoted(const char *text) {
    char *line = malloc(strlen(text) * 6 + 3), *to = line;
    if (line == NULL)
        return NULL;
    *to++ = '"';
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            *to++ = '\\';
            *to++ = (char)c;
        } else if (c < 0x20) {
            to += sprintf(to, "\\u%04x", c);
        } else {
            *to++ = (char)c;
        }
    }
    *to++ = '"';
    *to = '\0';
    return line;
}

/* Whether a file of sysfs has our name. */
static bool is_ours(const char *path) {
    char name[sizeof VMOVE_FORK_PORT + 1] = "";
    FILE *file = fopen(path, "re");
    bool read = file != NULL && fgets(name, sizeof name, file) != NULL;
    if (file != NULL)
        fclose(file);
    name[strcspn(name, "\n")] = '\0';
    return read && strcmp(name, VMOVE_FORK_PORT) == 0;
}

/* Where udev gives names to devices, by that; else as the kernel tells it. */
static bool find(char *path, size_t room) {
    static const char ports[] = "/sys/class/virtio-ports/";
    snprintf(path, room, "/dev/virtio-ports/%s", VMOVE_FORK_PORT);
    if (access(path, F_OK) == 0)
        return true;
    glob_t names;
    bool found = false;
    if (glob("/sys/class/virtio-ports/*/name", 0, NULL, &names) != 0)
        return false;
    for (size_t i = 0; !found && i < names.gl_pathc; i++) {
        const char *port = names.gl_pathv[i] + sizeof ports - 1;
        if ((found = is_ours(names.gl_pathv[i])))
            snprintf(path, room, "/dev/%.*s", (int)strcspn(port, "/"), port);
    }
    globfree(&names);
    return found;
}

static bool new_port(struct vmove_fork_port **into, int descriptor) {
    if ((*into = calloc(1, sizeof **into)) != NULL)
        (*into)->descriptor = descriptor;
    return *into != NULL;
}

int vmove_fork_open(struct vmove_fork_port **into, const char *path) {
    char found[300];
    if (!new_port(into, -1))
        return VMOVE_FORK_NO_MEMORY;
    struct vmove_fork_port *port = *into;
    if (path == NULL) {
        if (!find(found, sizeof found))
            return fail(port, VMOVE_FORK_NO_PORT, NO_PORT);
        path = found;
    }
    for (int64_t deadline = now_ms() + PATIENCE_MS;; poll(NULL, 0, AGAIN_MS)) {
        port->descriptor = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
        if (port->descriptor >= 0)
            return VMOVE_FORK_OK;
        if (errno != EBUSY && errno != EINTR)
            return fail(port, VMOVE_FORK_IO, "%s: %s", path, strerror(errno));
        if (now_ms() > deadline)
            return fail(port, VMOVE_FORK_IN_USE, "%s: another process has had it open for %d s: one at a time can use it", path,
                        PATIENCE_MS / 1000);
    }
}

int vmove_fork_open_descriptor(struct vmove_fork_port **into, int descriptor) {
    if (!new_port(into, descriptor))
        return VMOVE_FORK_NO_MEMORY;
    int flags = fcntl(descriptor, F_GETFL);
    if (flags < 0 || fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) < 0)
        return fail(*into, VMOVE_FORK_IO, "descriptor %d: %s", descriptor, strerror(errno));
    return VMOVE_FORK_OK;
}

void vmove_fork_close(struct vmove_fork_port *port) {
    if (port == NULL)
        return;
    if (port->descriptor >= 0)
        close(port->descriptor);
    free(port->buffer);
    free(port);
}

const char *vmove_fork_error(const struct vmove_fork_port *port) {
    return port != NULL ? port->error : "no memory";
}

/* Until the port is ready, or the time is over. */
static void wait_for(struct vmove_fork_port *port, short what, int ms) {
    struct pollfd ready = {.fd = port->descriptor, .events = what};
    /* A hang-up is said at once and always, while nobody is connected. */
    if (poll(&ready, 1, ms) > 0 && (ready.revents & (POLLHUP | POLLERR)) != 0)
        poll(NULL, 0, AGAIN_MS);
}

enum taken { TAKEN_SOME, TAKEN_NOTHING, TAKEN_GONE, TAKEN_ERROR };

/* Reads what is there. */
static enum taken take(struct vmove_fork_port *port) {
    if (port->room - port->length < CHUNK) {
        size_t room = port->room * 2 + CHUNK;
        char *more = realloc(port->buffer, room);
        if (more == NULL) {
            fail(port, VMOVE_FORK_NO_MEMORY, "no memory for an answer of more than %zu bytes", port->length);
            return TAKEN_ERROR;
        }
        port->buffer = more;
        port->room = room;
    }
    for (;;) {
        ssize_t count = read(port->descriptor, port->buffer + port->length, CHUNK);
        if (count > 0) {
            port->length += (size_t)count;
            return TAKEN_SOME;
        }
        if (count == 0)
            return TAKEN_GONE;
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return TAKEN_NOTHING;
        if (errno != EINTR) {
            fail(port, VMOVE_FORK_IO, "the port cannot be read: %s", strerror(errno));
            return TAKEN_ERROR;
        }
    }
}

/* Writes a line. What is still there to be read answers what somebody asked who is gone: it is thrown away. */
static int say(struct vmove_fork_port *port, const char *line) {
    size_t left = strlen(line);
    /* The line's end is counted, and is not the line's. */
    if (left > VMOVE_FORK_MAX_LINE + 1)
        return fail(port, VMOVE_FORK_TOO_LONG, "expected a line of %d bytes at most, found %zu: leave less as the result",
                    VMOVE_FORK_MAX_LINE, left - 1);
    if (port->descriptor < 0)
        return fail(port, VMOVE_FORK_NO_PORT, "the port is not open");
    enum taken taken;
    while ((taken = take(port)) == TAKEN_SOME)
        port->length = 0;
    port->length = 0;
    if (taken == TAKEN_ERROR)
        return VMOVE_FORK_IO;
    for (int64_t deadline = now_ms() + PATIENCE_MS; left > 0;) {
        ssize_t count = write(port->descriptor, line, left);
        if (count > 0) {
            line += count;
            left -= (size_t)count;
            deadline = now_ms() + PATIENCE_MS;
        } else if (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
            return fail(port, VMOVE_FORK_IO, "the port cannot be written: %s", strerror(errno));
        } else if (now_ms() > deadline) {
            return fail(port, VMOVE_FORK_NOBODY_LISTENS, NOBODY_LISTENS, PATIENCE_MS / 1000);
        } else {
            wait_for(port, POLLOUT, AGAIN_MS);
        }
    }
    return VMOVE_FORK_OK;
}

/* Reads a line, to be freed, however long that takes. */
static int hear(struct vmove_fork_port *port, char **line) {
    bool gone = false;
    for (size_t searched = 0;;) {
        char *end = port->length > searched ? memchr(port->buffer + searched, '\n', port->length - searched) : NULL;
        if (end != NULL) {
            size_t length = (size_t)(end - port->buffer);
            if ((*line = strndup(port->buffer, length)) == NULL)
                return fail(port, VMOVE_FORK_NO_MEMORY, "no memory for an answer of %zu bytes", length);
            port->length -= length + 1;
            memmove(port->buffer, end + 1, port->length);
            return VMOVE_FORK_OK;
        }
        searched = port->length;
        switch (take(port)) {
        case TAKEN_SOME:
            break;
        case TAKEN_ERROR:
            return VMOVE_FORK_IO;
        case TAKEN_GONE:
            gone = true;
            port->length = searched = 0; /* Of a line that was broken off the rest does not come. */
            poll(NULL, 0, AGAIN_MS);
            break;
        case TAKEN_NOTHING:
            /* Who listens again knows nothing of what was asked. */
            if (gone)
                return fail(port, VMOVE_FORK_LOST, LOST);
            wait_for(port, POLLIN, 1000);
        }
    }
}

/* Notes why the host refuses. `answer` has an error. */
static int refused(struct vmove_fork_port *port, const char *answer) {
    static const struct {
        const char *word;
        int code;
    } known[] = {{"forbidden", VMOVE_FORK_FORBIDDEN}, {"bad-request", VMOVE_FORK_BAD_REQUEST}, {"busy", VMOVE_FORK_BUSY}};
    char *word = vmove_fork_text(member(answer, "error")), *message = vmove_fork_text(member(answer, "message"));
    int code = VMOVE_FORK_REFUSED;
    for (size_t i = 0; word != NULL && i < sizeof known / sizeof *known; i++)
        if (strcmp(word, known[i].word) == 0)
            code = known[i].code;
    fail(port, code, "%s: %s", word != NULL ? word : "refused", message != NULL ? message : "the host says no more");
    free(word);
    free(message);
    return code;
}

/* Whether this answers the request: it has the name, and, unless that is NULL, this text there. */
static bool answers(const char *answer, const char *name, const char *text) {
    char *found = vmove_fork_text(member(answer, name));
    bool does = found != NULL && (text == NULL || strcmp(found, text) == 0);
    free(found);
    return does;
}

/* Asks until the host is not busy. Passes over answers to what others have asked before. `*answer` is to be freed. */
static int ask(struct vmove_fork_port *port, const char *request, const char *name, const char *text, char **answer) {
    int64_t deadline = now_ms() + BUSY_MS;
    int code = say(port, request);
    while (code == VMOVE_FORK_OK) {
        if ((code = hear(port, answer)) != VMOVE_FORK_OK)
            break;
        if (past_value(*answer, 0) == NULL || *past_space(*answer) != '{')
            code = fail(port, VMOVE_FORK_BAD_ANSWER, "expected an answer in JSON, found %.200s", *answer);
        else if (member(*answer, "error") != NULL)
            code = refused(port, *answer);
        else if (name != NULL && answers(*answer, name, text))
            return VMOVE_FORK_OK;
        free(*answer);
        if (code == VMOVE_FORK_BUSY && now_ms() < deadline) {
            poll(NULL, 0, BUSY_AGAIN_MS);
            code = say(port, request);
        }
    }
    return code;
}

static int bad_answer(struct vmove_fork_port *port, char *answer) {
    int code = fail(port, VMOVE_FORK_BAD_ANSWER, "expected an answer to what was asked, found %.200s", answer);
    free(answer);
    return code;
}

int vmove_fork(struct vmove_fork_port *port, unsigned count, struct vmove_fork_role *role) {
    char request[64], *answer;
    snprintf(request, sizeof request, "{\"fork\":%u}\n", count);
    int code = ask(port, request, "role", NULL, &answer);
    if (code != VMOVE_FORK_OK)
        return code;
    char *ticket = vmove_fork_text(member(answer, "ticket"));
    bool whole = ticket != NULL && strlen(ticket) < sizeof role->ticket && number(member(answer, "index"), &role->index) &&
                 number(member(answer, "size"), &role->size);
    if (whole)
        strcpy(role->ticket, ticket);
    free(ticket);
    if (!whole)
        return bad_answer(port, answer);
    free(answer);
    return VMOVE_FORK_OK;
}

/* A request with a ticket, to be freed. */
static char *with_ticket(const char *verb, const char *ticket, const char *rest) {
    char *name = quoted(ticket), *line = NULL;
    if (name != NULL) {
        size_t room = strlen(verb) + strlen(name) + strlen(rest) + 8;
        if ((line = malloc(room)) != NULL)
            snprintf(line, room, "{\"%s\":%s%s}\n", verb, name, rest);
    }
    free(name);
    return line;
}

/* Asks what may be asked twice. */
static int ask_again(struct vmove_fork_port *port, const char *verb, const char *ticket, const char *name, char **answer) {
    char *request = with_ticket(verb, ticket, "");
    if (request == NULL)
        return fail(port, VMOVE_FORK_NO_MEMORY, "no memory for a request");
    int code;
    do
        code = ask(port, request, name, ticket, answer);
    while (code == VMOVE_FORK_LOST);
    free(request);
    return code;
}

void vmove_fork_free_ends(struct vmove_fork_ends *ends) {
    for (size_t i = 0; i < ends->count; i++) {
        free(ends->end[i].result);
        free(ends->end[i].lost);
    }
    free(ends->end);
    *ends = (struct vmove_fork_ends){0};
}

/* Reads one child of an answer. */
static bool read_end(const char *at, struct vmove_fork_end *end) {
    *end = (struct vmove_fork_end){0};
    const char *result = member(at, "result");
    if (result != NULL)
        end->result = strndup(result, (size_t)(past_value(result, 0) - result));
    else
        end->lost = vmove_fork_text(member(at, "lost"));
    return number(member(at, "index"), &end->index) && (end->result != NULL || end->lost != NULL);
}

/* Reads the list of children that begins at `at`, which is well-formed. */
static bool read_ends(const char *at, struct vmove_fork_ends *ends) {
    if (at == NULL || *at != '[')
        return false;
    for (at = past_space(at + 1); *at != ']';) {
        struct vmove_fork_end *more = realloc(ends->end, (ends->count + 1) * sizeof *more);
        if (more == NULL)
            return false;
        ends->end = more;
        if (!read_end(at, &ends->end[ends->count++]))
            return false;
        at = past_space(past_value(at, 0));
        if (*at == ',')
            at = past_space(at + 1);
    }
    return true;
}

int vmove_join(struct vmove_fork_port *port, const char *ticket, struct vmove_fork_ends *ends) {
    char *answer;
    *ends = (struct vmove_fork_ends){0};
    int code = ask_again(port, "join", ticket, "joined", &answer);
    if (code != VMOVE_FORK_OK)
        return code;
    if (!read_ends(member(answer, "children"), ends)) {
        vmove_fork_free_ends(ends);
        return bad_answer(port, answer);
    }
    free(answer);
    return VMOVE_FORK_OK;
}

int vmove_kill(struct vmove_fork_port *port, const char *ticket, unsigned *living) {
    char *answer;
    unsigned count;
    int code = ask_again(port, "kill", ticket, "killed", &answer);
    if (code != VMOVE_FORK_OK)
        return code;
    if (!number(member(answer, "children"), living != NULL ? living : &count))
        return bad_answer(port, answer);
    free(answer);
    return VMOVE_FORK_OK;
}

int vmove_exit(struct vmove_fork_port *port, const char *ticket, const char *result) {
    result = result != NULL ? result : "null";
    const char *end = past_value(result, 0);
    if (end == NULL || *past_space(end) != '\0' || strpbrk(result, "\n\r") != NULL)
        return fail(port, VMOVE_FORK_BAD_REQUEST, "expected a result in JSON without line ends, found %.200s", result);
    size_t room = strlen(result) + 12;
    char *rest = malloc(room), *request = NULL, *answer;
    if (rest != NULL) {
        snprintf(rest, room, ",\"result\":%s", result);
        request = with_ticket("exit", ticket, rest);
    }
    free(rest);
    if (request == NULL)
        return fail(port, VMOVE_FORK_NO_MEMORY, "no memory for a request");
    int code;
    do /* No answer is awaited but a refusal. It counts once, however often it is said. */
        code = ask(port, request, NULL, NULL, &answer);
    while (code == VMOVE_FORK_LOST || code == VMOVE_FORK_NOBODY_LISTENS);
    free(request);
    return code;
}

int vmove_exit_text(struct vmove_fork_port *port, const char *ticket, const char *text) {
    char *result = quoted(text);
    if (result == NULL)
        return fail(port, VMOVE_FORK_NO_MEMORY, "no memory for a result of %zu bytes", strlen(text));
    int code = vmove_exit(port, ticket, result);
    free(result);
    return code;
}
