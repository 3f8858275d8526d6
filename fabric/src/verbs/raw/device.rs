//! An opened device and its protection domain.

use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_sys::{ibv_context, ibv_device_attr, ibv_pd, ibv_port_attr};

use super::library::{library, load};

/// An opened device.
#[derive(Debug)]
pub(in crate::verbs) struct Device {
    context: NonNull<ibv_context>,
}

// SAFETY: rule 2.
unsafe impl Send for Device {}
// SAFETY: rule 2.
unsafe impl Sync for Device {}

/// What a device and its port can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::verbs) struct Limits {
    /// Work requests in one send queue.
    pub(in crate::verbs) queue: u32,
    /// Completions in one completion queue.
    pub(in crate::verbs) completions: u32,
    /// READs of a peer that one queue pair answers at a time.
    pub(in crate::verbs) answers: u8,
    /// READs of our own that one queue pair has under way at a time.
    pub(in crate::verbs) asks: u8,
    /// Bytes in one work request.
    pub(in crate::verbs) message: u32,
    /// Packet size, as the library numbers it: 1 for 256 bytes to 5 for 4096.
    pub(in crate::verbs) mtu: u32,
    /// Local address in an InfiniBand subnet; 0 on Ethernet.
    pub(in crate::verbs) lid: u16,
}

impl Device {
    /// Opens the device of this name.
    ///
    /// # Errors
    /// `NotFound` if the library has no such device (not even the kernel's RDMA support may be there), and what
    /// opening it gave.
    pub(in crate::verbs) fn open(name: &str) -> io::Result<Self> {
        let list = List::get()?;
        for index in 0..list.len {
            // SAFETY: rule 1: `index` is inside the list, which ends after `len` pointers.
            let device = unsafe { *list.first.as_ptr().wrapping_add(index) };
            // SAFETY: rule 1: a device of the list, which is alive; the name is a terminated string inside it.
            let found = unsafe { (library().get_device_name)(device) };
            // SAFETY: as above.
            if unsafe { CStr::from_ptr(found) }.to_str() != Ok(name) {
                continue;
            }
            // SAFETY: rule 1.
            let context = unsafe { (library().open_device)(device) };
            let context = NonNull::new(context).ok_or_else(io::Error::last_os_error)?;
            let device = Self { context };
            rustix::io::ioctl_fionbio(device.events(), true)?;
            return Ok(device);
        }
        Err(io::Error::new(io::ErrorKind::NotFound, format!("libibverbs has no device {name}")))
    }

    /// What the device and `port` can do.
    pub(in crate::verbs) fn limits(&self, port: u8) -> io::Result<Limits> {
        // SAFETY: rule 3.
        let mut device: ibv_device_attr = unsafe { std::mem::zeroed() };
        // SAFETY: rules 1 and 3.
        check(unsafe { (library().query_device)(self.context.as_ptr(), &raw mut device) })?;
        // SAFETY: rule 3.
        let mut found: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: rules 1 and 3.
        check(unsafe { (library().query_port)(self.context.as_ptr(), port, &raw mut found) })?;
        let depth = |number: i32| u8::try_from(number.clamp(1, 255)).unwrap_or(1);
        Ok(Limits {
            queue: u32::try_from(device.max_qp_wr).unwrap_or(1),
            completions: u32::try_from(device.max_cqe).unwrap_or(1),
            answers: depth(device.max_qp_rd_atom),
            asks: depth(device.max_qp_init_rd_atom),
            message: found.max_msg_sz.max(4096),
            mtu: found.active_mtu,
            lid: found.lid,
        })
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_context {
        self.context.as_ptr()
    }

    /// Readable when there is [news](Self::take_news).
    pub(in crate::verbs) fn events(&self) -> BorrowedFd<'_> {
        // SAFETY: rule 1: the device's descriptor does not change.
        let fd = unsafe { (*self.context.as_ptr()).async_fd };
        // SAFETY: the descriptor is open as long as the device, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// What happened to the device, if there is something new.
    pub(in crate::verbs) fn take_news(&self) -> io::Result<Option<News>> {
        let mut event = MaybeUninit::<rdma_sys::ibv_async_event>::uninit();
        // SAFETY: rules 1 and 3.
        if unsafe { (library().get_async_event)(self.context.as_ptr(), event.as_mut_ptr()) } != 0 {
            let error = io::Error::last_os_error();
            return if error.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(error) };
        }
        // As a number: a library newer than the bindings may have kinds that their enum does not.
        let at =
            event.as_ptr().wrapping_byte_add(std::mem::offset_of!(rdma_sys::ibv_async_event, event_type));
        // SAFETY: the library has filled in the event, whose kind is a C enum at this place.
        let kind = unsafe { at.cast::<u32>().read() };
        // SAFETY: rule 3: the event as it was got. Until then what it is about cannot be destroyed.
        unsafe { (library().ack_async_event)(event.as_mut_ptr()) };
        use rdma_sys::ibv_event_type as is;
        Ok(Some(match kind {
            kind if kind == is::IBV_EVENT_DEVICE_FATAL as u32 => News::Lost,
            kind if kind == is::IBV_EVENT_PORT_ERR as u32 => News::Port("down"),
            kind if kind == is::IBV_EVENT_PORT_ACTIVE as u32 => News::Port("active"),
            other => News::Other(other),
        }))
    }
}

/// What may happen to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::verbs) enum News {
    /// It was removed, or does not work any more.
    Lost,
    /// Its port went down or came back.
    Port(&'static str),
    /// An event that connections notice by themselves; the library's number.
    Other(u32),
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: rule 1.
        unsafe { (library().close_device)(self.context.as_ptr()) };
    }
}

/// The library's list of devices.
struct List {
    first: NonNull<*mut rdma_sys::ibv_device>,
    len: usize,
}

impl List {
    fn get() -> io::Result<Self> {
        let mut len = 0;
        let library = load()?;
        // SAFETY: rule 3.
        let first = unsafe { (library.get_device_list)(&raw mut len) };
        let first = NonNull::new(first).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { first, len: usize::try_from(len).unwrap_or(0) })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: rule 1; opened devices stay open without the list.
        unsafe { (library().free_device_list)(self.first.as_ptr()) };
    }
}

/// A protection domain: what is registered in it can be reached by queue pairs made in it, and by no others.
#[derive(Debug)]
pub(in crate::verbs) struct Domain {
    pd: NonNull<ibv_pd>,
    device: Arc<Device>,
}

// SAFETY: rule 2.
unsafe impl Send for Domain {}
// SAFETY: rule 2.
unsafe impl Sync for Domain {}

impl Domain {
    pub(in crate::verbs) fn new(device: Arc<Device>) -> io::Result<Self> {
        // SAFETY: rule 1.
        let pd = unsafe { (library().alloc_pd)(device.as_ptr()) };
        let pd = NonNull::new(pd).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { pd, device })
    }

    pub(in crate::verbs) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn as_ptr(&self) -> *mut ibv_pd {
        self.pd.as_ptr()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: rule 1; the device is held by a field and closed after this.
        unsafe { (library().dealloc_pd)(self.pd.as_ptr()) };
    }
}

/// Calls that give 0 or an error number.
pub(super) fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result.abs())) }
}
