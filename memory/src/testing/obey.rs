//! A child that touches memory on command, one command per line. It answers each with one line that begins with `@`.

use std::collections::HashMap;
use std::io::BufRead;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

/// One mapped file.
#[derive(Clone, Copy)]
struct Map {
    base: usize,
    len: usize,
    fd: i32,
}

impl Map {
    fn word(self, offset: usize) -> &'static AtomicU64 {
        assert!(offset + 8 <= self.len && offset.is_multiple_of(8), "outside of the mapping");
        // SAFETY: inside a mapping that stays until the process ends, aligned, and used as atomics by everyone.
        unsafe { AtomicU64::from_ptr((self.base + offset) as *mut u64) }
    }
}

fn map_file(path: &str, private: bool, huge: bool) -> Map {
    let file = std::fs::File::options().read(true).write(true).open(path).expect("RAM file");
    let len = usize::try_from(file.metadata().expect("stat").len()).expect("fits");
    let flags = if private { libc::MAP_PRIVATE } else { libc::MAP_SHARED };
    // SAFETY: a new mapping.
    let base = unsafe {
        libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, file.as_raw_fd(), 0)
    };
    assert_ne!(base, libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    if huge {
        // SAFETY: the new mapping; the advice keeps its bytes.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
    }
    let fd = file.as_raw_fd();
    std::mem::forget(file);
    Map { base: base as usize, len, fd }
}

/// Through the kernel, as a device model's write to a socket would.
fn read_by_syscall(map: Map, offset: usize) -> u64 {
    let (mut receiver, sender) = std::os::unix::net::UnixStream::pair().expect("pair");
    // SAFETY: the kernel reads 8 bytes of the mapping.
    let wrote = unsafe { libc::write(sender.as_raw_fd(), (map.base + offset) as *const libc::c_void, 8) };
    if wrote != 8 {
        return u64::MAX;
    }
    let mut bytes = [0; 8];
    std::io::Read::read_exact(&mut receiver, &mut bytes).expect("pair");
    u64::from_ne_bytes(bytes)
}

/// Through the kernel, as a device model's read from a socket would.
fn write_by_syscall(map: Map, offset: usize, value: u64) -> u64 {
    let (receiver, mut sender) = std::os::unix::net::UnixStream::pair().expect("pair");
    std::io::Write::write_all(&mut sender, &value.to_ne_bytes()).expect("pair");
    // SAFETY: the kernel writes 8 bytes of the mapping, which are used as atomics by everyone.
    let read = unsafe { libc::read(receiver.as_raw_fd(), (map.base + offset) as *mut libc::c_void, 8) };
    if read == 8 { value } else { u64::MAX }
}

fn advise(map: Map, offset: usize, len: usize, advice: i32) -> String {
    // SAFETY: a range of the mapping; nobody holds references into it.
    let result = unsafe { libc::madvise((map.base + offset) as *mut libc::c_void, len, advice) };
    if result == 0 { "ok".to_owned() } else { std::io::Error::last_os_error().to_string() }
}

fn punch(map: Map, offset: usize, len: usize) -> String {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let off = |n: usize| libc::off_t::try_from(n).expect("fits");
    // SAFETY: concerns the file only.
    let result = unsafe { libc::fallocate(map.fd, mode, off(offset), off(len)) };
    if result == 0 { "ok".to_owned() } else { std::io::Error::last_os_error().to_string() }
}

/// Pins memory for I/O, as a request with direct I/O does while it is under way.
fn pin(map: Map, offset: usize, len: usize) -> Result<io_uring::IoUring, std::io::Error> {
    let ring = io_uring::IoUring::new(1)?;
    let buffer = libc::iovec { iov_base: (map.base + offset) as *mut libc::c_void, iov_len: len };
    // SAFETY: a range of the mapping, which stays until the process ends.
    unsafe { ring.submitter().register_buffers(&[buffer]) }?;
    Ok(ring)
}

/// Has the kernel write into pinned memory past the page table, as a device does.
fn write_pinned(ring: &mut io_uring::IoUring, map: Map, offset: usize, value: u64) -> std::io::Result<i32> {
    let disk = std::fs::File::from(rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC)?);
    std::os::unix::fs::FileExt::write_all_at(&disk, &value.to_ne_bytes(), 0)?;
    let (from, to) = (io_uring::types::Fd(disk.as_raw_fd()), (map.base + offset) as *mut u8);
    let read = io_uring::opcode::ReadFixed::new(from, to, 8, 0).build();
    // SAFETY: both the descriptor and the memory are there until the request has completed, below.
    unsafe { ring.submission().push(&read) }.map_err(std::io::Error::other)?;
    ring.submit_and_wait(1)?;
    Ok(ring.completion().next().map_or(-1, |done| done.result()))
}

/// Writes to each page once, in a scattered order, within about 100 ms. Tells `begun` after the first pages, so that something is written
/// before anyone looks, however busy the machine is.
fn write_each_page_once(map: Map, page: usize, begun: &std::sync::mpsc::Sender<()>) -> HashMap<usize, u64> {
    let pages = map.len / page;
    let pause = std::time::Duration::from_millis(100) / u32::try_from(pages).expect("few");
    let begin = std::time::Instant::now();
    (0..pages)
        .map(|i| {
            while begin.elapsed() < pause * u32::try_from(i).expect("few") {
                std::hint::spin_loop();
            }
            // 4093 is prime, and so visits every page.
            let offset = i * 4093 % pages * page;
            let value = i as u64 + 1_000_000;
            map.word(offset).store(value, Ordering::Release);
            if i == (pages / 8).min(64) {
                begun.send(()).expect("waited for");
            }
            (offset, value)
        })
        .collect()
}

/// Becomes nobody.
fn drop_privileges() -> String {
    // SAFETY: changes the credentials of all threads of this process, as glibc does it.
    let result = unsafe { libc::setresuid(65534, 65534, 65534) };
    if result == 0 { "ok".to_owned() } else { std::io::Error::last_os_error().to_string() }
}

pub fn obey() {
    let mut maps: Vec<Map> = Vec::new();
    let mut pinned: Option<io_uring::IoUring> = None;
    let mut busy: Option<Arc<AtomicBool>> = None;
    let mut writing: Option<JoinHandle<HashMap<usize, u64>>> = None;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words.get(i).and_then(|w| w.parse::<usize>().ok()).unwrap_or(0);
        let map = || maps[number(1)];
        let reply = match words[0] {
            "map" | "map-private" | "map-small" => {
                let map = map_file(words[1], words[0] == "map-private", words[0] != "map-small");
                maps.push(map);
                format!("{} {}", maps.len() - 1, map.base)
            }
            "write" => {
                map().word(number(2)).store(number(3) as u64, Ordering::Release);
                "ok".to_owned()
            }
            "read" => map().word(number(2)).load(Ordering::Acquire).to_string(),
            // Answers twice: at once, and with `done` when the memory was there.
            "later-read" | "later-write" | "later-sysread" | "later-syswrite" => {
                let (map, offset, value, what) = (map(), number(2), number(3) as u64, words[0].to_owned());
                println!("@ok");
                thread::spawn(move || {
                    let value = match what.as_str() {
                        "later-read" => map.word(offset).load(Ordering::Acquire),
                        "later-sysread" => read_by_syscall(map, offset),
                        "later-syswrite" => write_by_syscall(map, offset, value),
                        _ => {
                            map.word(offset).store(value, Ordering::Release);
                            value
                        }
                    };
                    println!("@done {offset} {value}");
                });
                continue;
            }
            "touch-all" => {
                let (map, page) = (map(), number(2));
                (0..map.len)
                    .step_by(page)
                    .for_each(|at| map.word(at).store(at as u64 + 1, Ordering::Release));
                "ok".to_owned()
            }
            // Microseconds for one access to each page.
            "time-reads" | "time-writes" => {
                let (map, page, begin) = (map(), number(2), std::time::Instant::now());
                for at in (0..map.len).step_by(page) {
                    let word = map.word(at);
                    let value = word.load(Ordering::Relaxed);
                    if words[0] == "time-writes" {
                        word.store(value + 1, Ordering::Relaxed);
                    }
                }
                begin.elapsed().as_micros().to_string()
            }
            "populate-read" => advise(map(), 0, map().len, libc::MADV_POPULATE_READ),
            "nohuge" => advise(map(), 0, map().len, libc::MADV_NOHUGEPAGE),
            "dontneed" => advise(map(), number(2), number(3), libc::MADV_DONTNEED),
            "remove" => advise(map(), number(2), number(3), libc::MADV_REMOVE),
            "later-remove" => {
                let (map, offset, len) = (map(), number(2), number(3));
                println!("@ok");
                thread::spawn(move || {
                    let reply = advise(map, offset, len, libc::MADV_REMOVE);
                    println!("@removed {offset} {reply}");
                });
                continue;
            }
            "pin" => match pin(map(), number(2), number(3)) {
                Ok(ring) => {
                    pinned = Some(ring);
                    "ok".to_owned()
                }
                Err(error) => error.to_string(),
            },
            "unpin" => {
                pinned = None;
                "ok".to_owned()
            }
            "write-pinned" => {
                let ring = pinned.as_mut().expect("pinned");
                write_pinned(ring, map(), number(2), number(3) as u64)
                    .map_or_else(|e| e.to_string(), |n| n.to_string())
            }
            "punch" => punch(map(), number(2), number(3)),
            "writer" => {
                let (map, page) = (map(), number(2));
                let (tell, told) = std::sync::mpsc::channel();
                writing = Some(thread::spawn(move || write_each_page_once(map, page, &tell)));
                told.recv().expect("it writes");
                "ok".to_owned()
            }
            "writer-done" => writing.as_ref().is_none_or(JoinHandle::is_finished).to_string(),
            "writer-end" => {
                let written = writing.take().expect("a writer").join().expect("the writer");
                written.iter().map(|(at, value)| format!("{at}:{value}")).collect::<Vec<_>>().join(" ")
            }
            // Gives its thread, which does not sleep until "rest".
            "busy" => {
                let (tell, told) = std::sync::mpsc::channel();
                let rest = Arc::new(AtomicBool::new(false));
                busy = Some(Arc::clone(&rest));
                thread::spawn(move || {
                    // SAFETY: has no arguments and changes nothing.
                    tell.send(unsafe { libc::gettid() }).expect("asked");
                    while !rest.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                    thread::park();
                });
                told.recv().expect("a thread").to_string()
            }
            "rest" => {
                busy.take().expect("a busy thread").store(true, Ordering::Relaxed);
                "ok".to_owned()
            }
            "drop-privileges" => drop_privileges(),
            other => format!("unknown command {other}"),
        };
        println!("@{reply}");
    }
}
