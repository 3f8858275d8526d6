# A guest that needs nothing: it goes over its memory again and again, looks whether what it wrote in the pass before is
# still there, and writes anew. Says '.' on the debug port after each pass, 'X' once when it finds something else.
#
# Loaded by QEMU's -kernel as a multiboot image at 1 MiB, without paging. AREA (bytes) may be set by the assembler.
.code32
.set LOAD, 0x100000
.set FIRST, 0x400000
.ifndef AREA
.set AREA, 0x2000000
.endif

header:
    .long 0x1badb002
    .long 0x00010000                    # the addresses below are valid
    .long -(0x1badb002 + 0x00010000)
    .long LOAD, LOAD, 0, 0
    .long LOAD + (start - header)

start:
    cli
    xorl %ebx, %ebx                     # number of the pass
pass:
    incl %ebx
    movl $FIRST, %edi
page:
    cmpl $1, %ebx
    je write
    leal -1(%ebx), %eax
    xorl %edi, %eax
    cmpl %eax, (%edi)
    jne bad
    cmpl %eax, 0x7fc(%edi)
    jne bad
    cmpl %eax, 0xffc(%edi)
    jne bad
write:
    movl %ebx, %eax
    xorl %edi, %eax
    movl %eax, (%edi)
    movl %eax, 0x7fc(%edi)
    movl %eax, 0xffc(%edi)
    pause                               # lets QEMU's own threads run
    addl $4096, %edi
    cmpl $(FIRST + AREA), %edi
    jb page
    movb $'.', %al
    outb %al, $0xe9
    jmp pass
bad:
    movb $'X', %al
    outb %al, $0xe9
stop:
    hlt
    jmp stop
