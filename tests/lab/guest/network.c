/* A guest that needs nothing but a virtio network card: it checks every frame that comes, answers it, looks again later whether the
 * frame is still in the memory where the card put it, and goes over its memory all the while. Lets its card go when it is asked to by
 * ACPI, and takes a new one.
 *
 * Loaded by QEMU's -kernel as a multiboot image at 1 MiB; no paging, no interrupts. Machine pc; the card is on its first bus and has
 * virtio's old register layout (QEMU's default there).
 *
 * Says '.' on the debug port after each pass over the memory, 'r' and a number now and then, which is how many frames it has received,
 * and 'X' with an explanation if it finds something else than it should. Frames are of type 0x88b6; every byte of them follows from
 * their number.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

enum {
    PAGE = 4096,
    /* Memory that it goes over. */
    FIRST = 0x400000,
    AREA = 0x800000,
    PAGES_A_TURN = 16,
    /* Pages for frames, one each: the card writes to the first half, the guest to the second. */
    SLOTS_AT = 0x1000000,
    SLOTS = 1024,
    RING = 256,
    ROOM = 2048,
    HEADER = 10,
    FRAME = 1014,
    SENDERS = 16,
    ANSWERS = 64,
    /* ACPI's registers for PCI hot plug on pc. */
    ACPI_UP = 0xae00,
    ACPI_DOWN = 0xae04,
    ACPI_EJECT = 0xae08,
    ACPI_SELECT = 0xae10,
    /* Registers of a virtio card, and where a card that was plugged in gets them. */
    FEATURES = 0x00,
    WANTED = 0x04,
    QUEUE_PAGE = 0x08,
    QUEUE_SIZE = 0x0c,
    QUEUE_SELECT = 0x0e,
    NOTIFY = 0x10,
    STATUS = 0x12,
    PLUGGED_AT = 0xd000,
    ANY_LAYOUT = 1 << 27,
    /* Of a descriptor: the card writes to it. Of the ring of what is offered: no interrupts. */
    CARD_WRITES = 2,
    NO_INTERRUPTS = 1,
};

struct frame {
    u8 to[6], from[6], type[2];
    u8 magic[4];
    u32 kind, sender, number;
    u8 bytes[FRAME - 30];
} __attribute__((packed));

struct queue {
    struct {
        u32 low, high, length;
        u16 flags, next;
    } descriptor[RING];
    struct {
        volatile u16 flags, index, slot[RING], unused;
    } offered __attribute__((aligned(PAGE)));
    struct {
        volatile u16 flags, index;
        volatile struct {
            u32 descriptor, length;
        } slot[RING];
    } used __attribute__((aligned(PAGE)));
} __attribute__((aligned(PAGE)));

struct answer {
    u8 header[HEADER];
    struct frame frame;
} __attribute__((packed));

static struct queue receiving, sending;
static struct answer answers[ANSWERS];
static u32 base, place, received_seen, sent_seen, next_slot;
/* Of each slot: how often it was offered, and the number of the frame in it, 0 if it holds none or may be written to. */
static u32 turn_of[SLOTS], number_in[SLOTS];
/* The slot that a descriptor offers. */
static u32 slot_of[RING];
static u32 last_number[SENDERS];
static u32 received, wrong;

static void out8(u16 port, u8 value) { __asm__ volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static void out16(u16 port, u16 value) { __asm__ volatile("outw %0, %1" ::"a"(value), "Nd"(port)); }
static void out32(u16 port, u32 value) { __asm__ volatile("outl %0, %1" ::"a"(value), "Nd"(port)); }
static u16 in16(u16 port) {
    u16 value;
    __asm__ volatile("inw %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
static u32 in32(u16 port) {
    u32 value;
    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}
/* Lets QEMU's own threads run. */
static void relax(void) { __asm__ volatile("pause" ::: "memory"); }
static void fence(void) { __asm__ volatile("lock; orl $0, (%%esp)" ::: "memory"); }

void *memset(void *to, int value, unsigned long length) {
    u8 *byte = to;
    while (length--) *byte++ = (u8)value;
    return to;
}
void *memcpy(void *to, const void *from, unsigned long length) {
    u8 *byte = to;
    const u8 *old = from;
    while (length--) *byte++ = *old++;
    return to;
}

static void say(const char *text) {
    while (*text) out8(0xe9, (u8)*text++);
}
static void say_hex(u32 value) {
    for (u32 digits = 8; digits--;) out8(0xe9, (u8)"0123456789abcdef"[value >> (digits * 4) & 15]);
}
static void bad(const char *what, u32 where, u32 number) {
    if (wrong++ > 20) return;
    say("X ");
    say(what);
    say(" at ");
    say_hex(where);
    say(" number ");
    say_hex(number);
    say("\n");
}

static u32 config_read(u32 device, u32 at) {
    out32(0xcf8, 0x80000000 | device << 11 | at);
    return in32(0xcfc);
}
static void config_write(u32 device, u32 at, u32 value) {
    out32(0xcf8, 0x80000000 | device << 11 | at);
    out32(0xcfc, value);
}

static u8 byte_of(u32 number, u32 at) { return (u8)(number * 31 + at * 7 + (at >> 8)); }
static u32 page_of(u32 slot) { return SLOTS_AT + slot * PAGE; }
static u32 mark_of(u32 slot, u32 at) { return (slot << 20 | turn_of[slot] << 4) ^ at; }

static int is_frame(const struct frame *frame, u32 number) {
    if (frame->type[0] != 0x88 || frame->type[1] != 0xb6 || frame->number != number) return 0;
    for (u32 i = 0; i < sizeof frame->bytes; i++)
        if (frame->bytes[i] != byte_of(number, i)) return 0;
    return 1;
}

/* The guest's own half of a slot's page is as it left it when it offered the slot. */
static void look_at_own_half(u32 slot) {
    for (u32 at = ROOM; at < PAGE; at += 1020)
        if (*(volatile u32 *)(page_of(slot) + at) != mark_of(slot, at)) bad("own half of a page", page_of(slot) + at, turn_of[slot]);
}

/* Offers the next slot by this descriptor. What the card wrote there long ago must still be there. */
static void offer(u32 descriptor) {
    u32 slot = next_slot++ % SLOTS, page = page_of(slot);
    if (number_in[slot]) {
        if (!is_frame((struct frame *)(page + HEADER), number_in[slot])) bad("an old frame is gone", page, number_in[slot]);
        look_at_own_half(slot);
        number_in[slot] = 0;
    }
    turn_of[slot]++;
    for (u32 at = ROOM; at < PAGE; at += 1020) *(volatile u32 *)(page + at) = mark_of(slot, at);
    slot_of[descriptor] = slot;
    receiving.descriptor[descriptor].low = page;
    receiving.descriptor[descriptor].length = ROOM;
    receiving.descriptor[descriptor].flags = CARD_WRITES;
    receiving.offered.slot[receiving.offered.index % RING] = (u16)descriptor;
    fence();
    receiving.offered.index++;
}

static void set_queue(u32 number, struct queue *queue) {
    memset(queue, 0, sizeof *queue);
    queue->offered.flags = NO_INTERRUPTS;
    out16((u16)(base + QUEUE_SELECT), (u16)number);
    if (in16((u16)(base + QUEUE_SIZE)) != RING) bad("a queue of another size", base, number);
    out32((u16)(base + QUEUE_PAGE), (u32)queue / PAGE);
}

static void take_card(u32 device) {
    base = config_read(device, 0x10) & 0xfffc;
    if (!base) {
        base = PLUGGED_AT + device * 0x80;
        config_write(device, 0x10, base);
    }
    config_write(device, 0x04, 0x0005);
    place = device;
    out8((u16)(base + STATUS), 0);
    out8((u16)(base + STATUS), 3);
    out32((u16)(base + WANTED), in32((u16)(base + FEATURES)) & ANY_LAYOUT);
    set_queue(0, &receiving);
    set_queue(1, &sending);
    received_seen = sent_seen = 0;
    for (u32 descriptor = 0; descriptor < RING; descriptor++) offer(descriptor);
    out8((u16)(base + STATUS), 7);
    out16((u16)(base + NOTIFY), 0);
    say("card\n");
}

static void look_for_card(void) {
    for (u32 device = 1; !base && device < 32; device++)
        if (config_read(device, 0) == 0x10001af4) take_card(device);
}

static void hot_plug(void) {
    u32 down, up;
    out32(ACPI_SELECT, 0);
    down = in32(ACPI_DOWN);
    if (down && down != 0xffffffff) {
        /* The old card writes nothing any more. */
        if (base && down >> place & 1) {
            out8((u16)(base + STATUS), 0);
            base = 0;
        }
        out32(ACPI_EJECT, down);
        say("ejected\n");
    }
    out32(ACPI_SELECT, 0);
    up = in32(ACPI_UP);
    if (up && up != 0xffffffff) look_for_card();
}

static void answer(const struct frame *asked) {
    u32 slot = sending.offered.index % ANSWERS;
    struct answer *answer = &answers[slot];
    /* The card tells which it has sent; with all of them on their way this frame gets no answer. */
    sent_seen = sending.used.index;
    if ((u16)(sending.offered.index - sent_seen) >= ANSWERS) return;
    memset(answer->header, 0, HEADER);
    memcpy(&answer->frame, asked, 30);
    memcpy(answer->frame.to, asked->from, 6);
    answer->frame.from[0] = 0x52;
    answer->frame.kind = 2;
    for (u32 i = 0; i < sizeof answer->frame.bytes; i++) answer->frame.bytes[i] = byte_of(~asked->number, i);
    sending.descriptor[slot].low = (u32)answer;
    sending.descriptor[slot].length = sizeof *answer;
    sending.offered.slot[sending.offered.index % RING] = (u16)slot;
    fence();
    sending.offered.index++;
    fence();
    out16((u16)(base + NOTIFY), 1);
}

static void receive(void) {
    u32 turn = 0;
    while (base && (u16)received_seen != receiving.used.index && turn++ < 32) {
        u32 descriptor, slot, length;
        fence();
        descriptor = receiving.used.slot[received_seen % RING].descriptor % RING;
        length = receiving.used.slot[received_seen % RING].length;
        slot = slot_of[descriptor];
        struct frame *frame = (struct frame *)(page_of(slot) + HEADER);
        received_seen++;
        look_at_own_half(slot);
        if (length == FRAME + HEADER || frame->type[0] == 0) {
            if (frame->type[0] != 0x88 || frame->type[1] != 0xb6) bad("no frame", page_of(slot), length);
        }
        /* The host's own frames (IPv6 looks for neighbours) are shorter and let pass. */
        if (frame->type[0] == 0x88 && frame->type[1] == 0xb6) {
            u32 number = frame->number, sender = frame->sender % SENDERS;
            if (length != FRAME + HEADER || !is_frame(frame, number)) bad("a wrong frame", page_of(slot), number);
            else if (number <= last_number[sender]) bad("a frame for the second time", page_of(slot), number);
            else {
                last_number[sender] = number;
                number_in[slot] = number;
                if (++received % 16 == 0) {
                    say("r");
                    say_hex(received);
                    say("\n");
                }
                answer(frame);
            }
        }
        offer(descriptor);
    }
    if (turn) out16((u16)(base + NOTIFY), 0);
}

/* Each page says in three places which pass wrote it. */
static void go_over_memory(void) {
    static u32 at = FIRST, pass;
    for (u32 i = 0; i < PAGES_A_TURN; i++) {
        volatile u32 *page = (volatile u32 *)at;
        u32 was = pass ^ at, is = (pass + 1) ^ at;
        if (pass && (page[0] != was || page[511] != was || page[1023] != was)) bad("a page", at, pass);
        page[0] = page[511] = page[1023] = is;
        relax();
        at += PAGE;
        if (at == FIRST + AREA) {
            at = FIRST;
            pass++;
            say(".\n");
        }
    }
}

void main(void) {
    look_for_card();
    for (;;) {
        go_over_memory();
        hot_plug();
        receive();
    }
}

__asm__(".section .header, \"ax\"\n"
        ".long 0x1badb002, 0x00000000, -0x1badb002\n"
        ".global _start\n"
        "_start: cli\n"
        "  movl $stack_end, %esp\n"
        "  call main\n"
        "1: hlt\n"
        "  jmp 1b\n"
        ".bss\n"
        ".align 16\n"
        ".skip 16384\n"
        "stack_end:\n"
        ".text\n");
