/* For C programs in a guest of vmove that forks itself: the whole machine is forked, and this process goes on in each child.
 *
 *     struct vmove_fork_port *port;
 *     struct vmove_fork_role role;
 *     if (vmove_fork_open(&port, NULL) != 0)
 *         return 1;
 *     if (vmove_fork(port, 4, &role) != VMOVE_FORK_OK)
 *         errx(1, "%s", vmove_fork_error(port));
 *     if (role.index > 0) {
 *         // In each of four machines. This one ends here, and leaves its result.
 *         vmove_exit(port, role.ticket, "42");
 *         errx(1, "%s", vmove_fork_error(port));
 *     }
 *     struct vmove_fork_ends ends;
 *     if (vmove_join(port, role.ticket, &ends) != VMOVE_FORK_OK)
 *         errx(1, "%s", vmove_fork_error(port));
 *     for (size_t i = 0; i < ends.count; i++)
 *         printf("child %u: %s\n", ends.end[i].index, ends.end[i].result);
 *     vmove_fork_free_ends(&ends);
 *     vmove_fork_close(port);
 *
 * Build: cc -std=c11 program.c vmove_fork.c. Needs nothing but a C library with POSIX. Not for use by several threads at once.
 */
#ifndef VMOVE_FORK_H
#define VMOVE_FORK_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Name of the virtio-serial port. */
#define VMOVE_FORK_PORT "org.vmove.fork"
/* Longest line that the host takes, in bytes without its end. A result with what is around it (up to 64 bytes) is one line. */
#define VMOVE_FORK_MAX_LINE 65536

/* What became of a request. vmove_fork_error() says it in words. */
enum vmove_fork_code {
    VMOVE_FORK_OK = 0,
    /* This machine has no such port. */
    VMOVE_FORK_NO_PORT,
    /* Another process has had it open for 10 s. */
    VMOVE_FORK_IN_USE,
    /* Nobody on the host has listened for 10 s. */
    VMOVE_FORK_NOBODY_LISTENS,
    /* The host let go of the port before it answered: whether it did what was asked is not known. Only vmove_fork and vmove_exit. */
    VMOVE_FORK_LOST,
    /* The host lets no guest do this, or not so often: its configuration says what it allows. */
    VMOVE_FORK_FORBIDDEN,
    /* No such ticket, or a count or a result that is none. */
    VMOVE_FORK_BAD_REQUEST,
    /* The host has been busy for 30 s. */
    VMOVE_FORK_BUSY,
    /* The host refuses for another reason: the text begins with its code. */
    VMOVE_FORK_REFUSED,
    /* The line would have more than VMOVE_FORK_MAX_LINE bytes. Nothing was written. */
    VMOVE_FORK_TOO_LONG,
    /* The host said what is no answer. */
    VMOVE_FORK_BAD_ANSWER,
    /* Reading or writing failed; the text has the reason. */
    VMOVE_FORK_IO,
    VMOVE_FORK_NO_MEMORY
};

/* An open port. */
struct vmove_fork_port;

/* What a machine is after a fork. */
struct vmove_fork_role {
    /* 0 in the parent; in children from 1 to size. */
    unsigned index;
    /* Children of this fork. */
    unsigned size;
    /* By which the parent joins or kills them, and a child ends. */
    char ticket[64];
};

/* How a child has ended. */
struct vmove_fork_end {
    /* From 1. */
    unsigned index;
    /* What it left, as JSON; NULL if it was lost. */
    char *result;
    /* Why it left nothing, as plain text; NULL if it left a result. */
    char *lost;
};

struct vmove_fork_ends {
    size_t count;
    /* In the order of their indexes. */
    struct vmove_fork_end *end;
};

/* Opens the port: the device at `path`, or, if that is NULL, the one with the name VMOVE_FORK_PORT. Waits up to 10 s for a process that
 * has it open. `*port` is NULL only for VMOVE_FORK_NO_MEMORY: close it also after an error. Its descriptor is not inherited by exec. */
int vmove_fork_open(struct vmove_fork_port **port, const char *path);

/* Takes a descriptor that is open for reading and writing, such as a socket, as the port; closes it with the port. */
int vmove_fork_open_descriptor(struct vmove_fork_port **port, int descriptor);

/* Forks this machine. Returns in the parent, and in each of `count` children. */
int vmove_fork(struct vmove_fork_port *port, unsigned count, struct vmove_fork_role *role);

/* Waits until all children of a ticket have ended, and tells how. The ticket is used up then. Free `ends` after VMOVE_FORK_OK. */
int vmove_join(struct vmove_fork_port *port, const char *ticket, struct vmove_fork_ends *ends);

/* Ends all children of a ticket. `living`, unless NULL, gets how many lived. */
int vmove_kill(struct vmove_fork_port *port, const char *ticket, unsigned *living);

/* Ends this machine, which is a child of the ticket. `result` is JSON without line ends, or NULL for none. Returns only if it does not end. */
int vmove_exit(struct vmove_fork_port *port, const char *ticket, const char *result);

/* As vmove_exit, with a text as the result, which is UTF-8. */
int vmove_exit_text(struct vmove_fork_port *port, const char *ticket, const char *text);

/* The text of a result that is a JSON string, to be freed; NULL if it is something else. */
char *vmove_fork_text(const char *result);

void vmove_fork_free_ends(struct vmove_fork_ends *ends);

/* The last error of this port, in words: what was expected, what was found, what to do. Valid until the next request. */
const char *vmove_fork_error(const struct vmove_fork_port *port);

/* NULL is allowed. */
void vmove_fork_close(struct vmove_fork_port *port);

#ifdef __cplusplus
}
#endif
#endif
