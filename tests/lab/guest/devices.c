/* A guest that owns devices: it drives virtual functions of an igb card by descriptor rings, lets devices go when it is asked to
 * by ACPI, takes new ones, and goes over its memory all the while.
 *
 * Loaded by QEMU's -kernel as a multiboot image at 1 MiB; no paging, no interrupts. Machine q35, devices on root ports. Words of
 * -append: "stubborn" never lets a device go; "quiet" answers frames but sends none by itself; "job0" and "job1" are the two ranks of
 * a parallel job, which count together; "ballast" fills a large part of memory once, and looks at it now and then (needs 256 MiB).
 *
 * It tells what happens on the debug port, a line each, and keeps its counts in the page at STATE, where the host can read them in
 * the guest's RAM file. What it sends are frames of type 0x88b5: a "ping" to everybody, a "pong" to whoever pinged; every byte of
 * them follows from their number and is checked in the memory that the device wrote it to.
 *
 * The job: each rank has a value, and a step makes a new one of both ranks' values. Nobody begins a step before it has the other's value
 * of it, so a frame that is not repeated, or a rank that is not there, holds both up; the results of the last steps can be read by the
 * host. A frame of the job ("step") has the rank, its value of this step and its value of the one before in its first bytes.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    STATE = 0x200000,
    FIRST = 0x400000,
    AREA = 0x1000000,
    BALLAST = 0x4000000,
    BALLAST_END = 0xe000000,
    PAGES_A_TURN = 16,
    TURNS_A_PING = 64,
    TURNS_A_TELLING = 16,
    RESULTS = 64,
    PING = 1,
    PONG = 2,
    STEP = 3,
    /* ACPI's registers for PCI hot plug on q35. */
    ACPI_UP = 0xcc0,
    ACPI_DOWN = 0xcc4,
    ACPI_EJECT = 0xcc8,
    ACPI_SELECT = 0xcd0,
    ACPI_BUSES = 8,
    RING = 16,
    BUFFER = 2048,
    FRAME = 1000,
    CARDS = 4,
    /* Registers of a virtual function of the 82576 (igbvf). */
    CTRL = 0x0000,
    MAILBOX = 0x0c40,
    MESSAGE = 0x0800,
    RX = 0x2800,
    TX = 0x3800,
    BASE_LOW = 0x00,
    BASE_HIGH = 0x04,
    LENGTH = 0x08,
    SPLIT = 0x0c,
    HEAD = 0x10,
    TAIL = 0x18,
    CONTROL = 0x28,
    ENABLE = 1 << 25,
};

/* Counts, for the host. */
struct state {
    u32 magic;   /* "VMDV" */
    u32 passes;  /* over the memory */
    u32 damaged; /* pages that held something else than was written */
    u32 cards;   /* that work now */
    u32 plugged, ejected;
    u32 sent, received, wrong; /* frames */
    u32 last_buffer, last_number, last_length; /* where the device wrote the last good frame */
    u8 mac[8]; /* of the first card */
    u32 step;  /* of the job, which is under way */
    u32 unused;
    struct {
        u32 step, value; /* with which it began */
    } results[RESULTS];
};
#define state (*(volatile struct state *)STATE)

struct frame {
    u8 to[6], from[6], type[2];
    u8 magic[4];
    u32 kind, number;
    u8 bytes[FRAME - 26];
} __attribute__((packed));

/* The first bytes of a frame of the job. */
struct telling {
    u32 rank, value, before;
} __attribute__((packed));

struct descriptor {
    volatile u32 word[4];
} __attribute__((aligned(16)));

struct card {
    struct descriptor rx[RING], tx[RING];
    u8 rx_buffer[RING][BUFFER], tx_buffer[RING][BUFFER];
    u32 base, bus, rx_next, tx_next, tx_done, used;
    u8 mac[6];
} __attribute__((aligned(4096)));

static struct card cards[CARDS];
static u32 number, stubborn, quiet;
/* The job: which rank this is, if any, and its value of this step and of the one before. */
static u32 in_job, rank, value, before;

static void out8(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static void out32(u16 port, u32 value) { __asm__ volatile("outl %0, %1" ::"a"(value), "Nd"(port)); }
static u32 in32(u16 port) {
    u32 value;
    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
/* Lets QEMU's own threads run. */
static void relax(void) { __asm__ volatile("pause" ::: "memory"); }

void *memset(void *to, int value, unsigned long length) {
    u8 *byte = to;
    while (length--) *byte++ = (u8)value;
    return to;
}

static void say(const char *text) {
    while (*text) out8(0xe9, (u8)*text++);
}
static void say_hex(u32 value, u32 digits) {
    while (digits--) out8(0xe9, (u8)"0123456789abcdef"[value >> (digits * 4) & 15]);
}
static void say_mac(const u8 *mac) {
    for (u32 i = 0; i < 6; i++) {
        say_hex(mac[i], 2);
        say(i < 5 ? ":" : "\n");
    }
}

static u32 config_read(u32 bus, u32 device, u32 at) {
    out32(0xcf8, 0x80000000 | bus << 16 | device << 11 | at);
    return in32(0xcfc);
}
static void config_write(u32 bus, u32 device, u32 at, u32 value) {
    out32(0xcf8, 0x80000000 | bus << 16 | device << 11 | at);
    out32(0xcfc, value);
}

static u32 read32(struct card *card, u32 at) { return *(volatile u32 *)(card->base + at); }
static void write32(struct card *card, u32 at, u32 value) { *(volatile u32 *)(card->base + at) = value; }

/* Gives the memory BARs of the device on a bus places in its bridge's window, and lets it write memory. The first BAR's. */
static u32 place_bars(u32 port, u32 bus) {
    u32 next = (config_read(0, port, 0x20) & 0xfff0) << 16, first = 0;
    config_write(0, port, 0x04, 0x0007);
    config_write(bus, 0, 0x04, 0);
    for (u32 bar = 0; bar < 6; bar++) {
        u32 at = 0x10 + bar * 4, kind, size;
        config_write(bus, 0, at, 0xffffffff);
        kind = config_read(bus, 0, at);
        if (kind == 0 || (kind & 1)) continue;
        size = ~(kind & ~15u) + 1;
        next = (next + size - 1) & ~(size - 1);
        config_write(bus, 0, at, next);
        if (!first) first = next;
        next += size;
        if ((kind & 6) == 4) config_write(bus, 0, 0x10 + ++bar * 4, 0);
    }
    config_write(bus, 0, 0x04, 0x0006);
    return first;
}

/* Asks the physical function's driver to begin anew with this function. 1 if it did, and said a MAC address. */
static int reset(struct card *card) {
    u32 tries, word[3];
    write32(card, CTRL, read32(card, CTRL) | 1 << 26);
    for (u32 round = 0; round < 20; round++) {
        /* Take the mailbox, say "reset", ring. */
        for (tries = 0; tries < 100000 && !(read32(card, MAILBOX) & 4); tries++) {
            write32(card, MAILBOX, 4);
            relax();
        }
        write32(card, MESSAGE, 1);
        write32(card, MAILBOX, 1);
        for (tries = 0; tries < 300000; tries++) {
            relax();
            if (read32(card, MAILBOX) & 0x10) break;
        }
        if (tries == 300000) continue;
        for (u32 i = 0; i < 3; i++) word[i] = read32(card, MESSAGE + i * 4);
        write32(card, MAILBOX, 2);
        if (word[0] == 0x80000001) {
            for (u32 i = 0; i < 6; i++) card->mac[i] = (u8)(word[1 + i / 4] >> i % 4 * 8);
            return 1;
        }
        if (word[0] == 0x40000001) {
            say("card refused: it has no MAC address\n");
            return 0;
        }
    }
    say("card silent: the physical function does not answer\n");
    return 0;
}

static void ring(struct card *card, u32 at, struct descriptor *descriptors) {
    write32(card, at + BASE_LOW, (u32)descriptors);
    write32(card, at + BASE_HIGH, 0);
    write32(card, at + LENGTH, RING * sizeof(struct descriptor));
    write32(card, at + HEAD, 0);
    write32(card, at + TAIL, 0);
}

static void offer(struct card *card, u32 slot) {
    card->rx[slot].word[0] = (u32)card->rx_buffer[slot];
    card->rx[slot].word[1] = card->rx[slot].word[2] = card->rx[slot].word[3] = 0;
}

static void take(u32 port, u32 bus) {
    struct card *card = cards;
    u32 id = config_read(bus, 0, 0);
    while (card->used && card < cards + CARDS - 1) card++;
    say("device ");
    say_hex(id & 0xffff, 4);
    say(":");
    say_hex(id >> 16, 4);
    say(" on bus ");
    say_hex(bus, 2);
    say("\n");
    /* Of Intel's virtual functions 82576 and I350. */
    if ((id != 0x10ca8086 && id != 0x15208086) || card->used) return;
    memset(card, 0, sizeof *card);
    card->bus = bus;
    card->base = place_bars(port, bus);
    if (!reset(card)) return;
    ring(card, RX, card->rx);
    write32(card, RX + SPLIT, 0x02000002); /* one buffer of 2 KiB a frame */
    write32(card, RX + CONTROL, ENABLE);
    ring(card, TX, card->tx);
    write32(card, TX + CONTROL, ENABLE);
    for (u32 slot = 0; slot < RING; slot++) offer(card, slot);
    write32(card, RX + TAIL, RING - 1);
    card->used = 1;
    state.cards++;
    if (card == cards)
        for (u32 i = 0; i < 6; i++) state.mac[i] = card->mac[i];
    say("card up ");
    say_mac(card->mac);
}

/* Devices behind bridges of bus 0 that no card is known for. */
static void look(void) {
    for (u32 port = 0; port < 32; port++) {
        u32 bus, known = 0;
        if (config_read(0, port, 0) == 0xffffffff || (config_read(0, port, 0x0c) >> 16 & 0x7f) != 1) continue;
        bus = config_read(0, port, 0x18) >> 8 & 0xff;
        if (bus == 0 || config_read(bus, 0, 0) == 0xffffffff) continue;
        for (u32 i = 0; i < CARDS; i++) known |= cards[i].used && cards[i].bus == bus;
        if (!known) take(port, bus);
    }
}

static void hot_plug(void) {
    for (u32 bus = 0; bus < ACPI_BUSES; bus++) {
        u32 down;
        out32(ACPI_SELECT, bus);
        down = in32(ACPI_DOWN);
        if (down && down != 0xffffffff && !stubborn) {
            out32(ACPI_EJECT, down);
            state.ejected++;
            for (u32 i = 0; i < CARDS; i++) {
                if (!cards[i].used || config_read(cards[i].bus, 0, 0) != 0xffffffff) continue;
                cards[i].used = 0;
                state.cards--;
            }
            say("ejected\n");
        }
        out32(ACPI_SELECT, bus);
        u32 up = in32(ACPI_UP);
        if (up && up != 0xffffffff) {
            state.plugged++;
            say("plugged\n");
            look();
        }
    }
}

static u8 byte_of(u32 of, u32 at) { return (u8)(of * 31 + at * 7 + (at >> 8)); }

static void send(struct card *card, const u8 *to, u32 kind, u32 as) {
    u32 slot = card->tx_next % RING;
    struct frame *frame = (struct frame *)card->tx_buffer[slot];
    /* The device marks what it has sent. */
    while (card->tx_done != card->tx_next && (card->tx[card->tx_done % RING].word[3] & 1)) card->tx_done++;
    if (card->tx_next - card->tx_done >= RING - 1) return;
    for (u32 i = 0; i < 6; i++) frame->to[i] = to[i], frame->from[i] = card->mac[i];
    frame->type[0] = 0x88, frame->type[1] = 0xb5;
    frame->magic[0] = 'V', frame->magic[1] = 'M', frame->magic[2] = 'D', frame->magic[3] = 'V';
    frame->kind = kind, frame->number = as;
    for (u32 i = 0; i < sizeof frame->bytes; i++) frame->bytes[i] = byte_of(as, i);
    if (kind == STEP) *(struct telling *)frame->bytes = (struct telling){rank, value, before};
    card->tx[slot].word[0] = (u32)frame;
    card->tx[slot].word[1] = 0;
    card->tx[slot].word[2] = 0x2b300000 | FRAME; /* advanced data descriptor, whole frame, report it */
    card->tx[slot].word[3] = FRAME << 14;
    card->tx_next++;
    write32(card, TX + TAIL, card->tx_next % RING);
    state.sent++;
}

static int is_own(const struct card *card, const struct frame *frame) {
    for (u32 i = 0; i < 6; i++)
        if (frame->from[i] != card->mac[i]) return 0;
    return 1;
}

static void begin_step(u32 step, u32 with) {
    u32 at = step % RESULTS;
    before = value;
    value = with;
    state.results[at].step = ~0u;
    state.results[at].value = with;
    state.results[at].step = step;
    state.step = step;
}

/* What the other rank tells. It may be a step behind us, since it lacks a frame, or ahead, since we do. */
static void hear(u32 of, const struct telling *told) {
    u32 theirs = told->value, step = state.step;
    if (!in_job || told->rank == rank || of < step) return;
    if (of > step + 1) {
        state.wrong++;
        say("the other rank went on without this one\n");
        return;
    }
    if (of == step + 1) theirs = told->before;
    begin_step(step + 1, rank == 0 ? value * 1664525 + theirs + step : value * 22695477 + (theirs ^ step));
}

static void receive(struct card *card) {
    for (u32 turn = 0; turn < RING; turn++) {
        u32 slot = card->rx_next % RING, length, good;
        struct frame *frame = (struct frame *)card->rx_buffer[slot];
        if (!(card->rx[slot].word[2] & 1)) return;
        length = card->rx[slot].word[3] & 0xffff;
        /* The card also gives frames to everybody back to whoever sent them. */
        if (frame->type[0] == 0x88 && frame->type[1] == 0xb5 && !is_own(card, frame)) {
            good = length >= FRAME && frame->magic[0] == 'V' && frame->magic[1] == 'M' && frame->magic[2] == 'D' && frame->magic[3] == 'V';
            for (u32 i = frame->kind == STEP ? sizeof(struct telling) : 0; good && i < sizeof frame->bytes; i++)
                good = frame->bytes[i] == byte_of(frame->number, i);
            if (good) {
                state.received++;
                if (frame->kind == STEP) {
                    hear(frame->number, (const struct telling *)frame->bytes);
                } else {
                    state.last_buffer = (u32)frame;
                    state.last_number = frame->number;
                    state.last_length = length;
                }
                if (frame->kind == PING) send(card, frame->from, PONG, frame->number);
            } else {
                state.wrong++;
                say("wrong frame\n");
            }
            if (state.received % 256 == 1) {
                say("frames sent ");
                say_hex(state.sent, 8);
                say(" received ");
                say_hex(state.received, 8);
                say(" wrong ");
                say_hex(state.wrong, 8);
                say("\n");
            }
        }
        /* The last good frame stays readable until the slot's next turn: a buffer is offered again in place. */
        offer(card, slot);
        write32(card, RX + TAIL, slot);
        card->rx_next++;
    }
}

/* Each page says in three places which pass wrote it. */
static void go_over_memory(void) {
    static u32 at = FIRST, pass;
    for (u32 i = 0; i < PAGES_A_TURN; i++) {
        volatile u32 *page = (volatile u32 *)at;
        u32 was = pass ^ at, is = (pass + 1) ^ at;
        if (pass && (page[0] != was || page[511] != was || page[1023] != was)) {
            state.damaged++;
            say("DAMAGE at ");
            say_hex(at, 8);
            say("\n");
        }
        page[0] = page[511] = page[1023] = is;
        relax();
        at += 4096;
        if (at == FIRST + AREA) {
            at = FIRST;
            pass++;
            state.passes = pass;
            say(".\n");
        }
    }
}

static u32 ballast_of(u32 at) { return at * 2654435761u ^ at >> 7; }

static void take_ballast(void) {
    for (u32 at = BALLAST; at < BALLAST_END; at += 4) *(volatile u32 *)at = ballast_of(at);
}

/* A page a turn, in three places. */
static void look_at_ballast(void) {
    static u32 at = BALLAST;
    for (u32 i = 0; i < 3; i++) {
        u32 word = at + (i == 0 ? 0 : i == 1 ? 2044 : 4092);
        if (*(volatile u32 *)word == ballast_of(word)) continue;
        state.damaged++;
        say("DAMAGED BALLAST at ");
        say_hex(word, 8);
        say("\n");
    }
    at = at + 4096 == BALLAST_END ? BALLAST : at + 4096;
}

static int has_word(const char *text, const char *word) {
    for (; text && *text; text++) {
        const char *a = text, *b = word;
        while (*b && *a == *b) a++, b++;
        if (!*b) return 1;
    }
    return 0;
}

void main(u32 *multiboot) {
    static const u8 everybody[6] = {255, 255, 255, 255, 255, 255};
    const char *words = (multiboot[0] & 4) ? (const char *)multiboot[4] : 0;
    u32 ballast = (u32)has_word(words, "ballast");
    stubborn = (u32)has_word(words, "stubborn");
    quiet = (u32)has_word(words, "quiet");
    memset((void *)STATE, 0, 4096);
    in_job = (u32)(has_word(words, "job0") || has_word(words, "job1"));
    rank = (u32)has_word(words, "job1");
    if (in_job) begin_step(1, 17 + rank * 6);
    state.magic = 0x56444d56;
    if (ballast) take_ballast();
    say("guest up\n");
    look();
    for (u32 turn = 1;; turn++) {
        go_over_memory();
        if (ballast) look_at_ballast();
        hot_plug();
        for (u32 i = 0; i < CARDS; i++) {
            if (!cards[i].used) continue;
            receive(&cards[i]);
            if (!quiet && turn % TURNS_A_PING == 0) send(&cards[i], everybody, PING, number++);
            if (in_job && turn % TURNS_A_TELLING == 0) send(&cards[i], everybody, STEP, state.step);
        }
    }
}

__asm__(".section .header, \"ax\"\n"
        ".long 0x1badb002, 0x00000000, -0x1badb002\n"
        ".global _start\n"
        "_start: cli\n"
        "  movl $stack_end, %esp\n"
        "  pushl %ebx\n"
        "  call main\n"
        "1: hlt\n"
        "  jmp 1b\n"
        ".bss\n"
        ".align 16\n"
        ".skip 16384\n"
        "stack_end:\n"
        ".text\n");
