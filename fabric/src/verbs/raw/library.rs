//! The RDMA libraries, loaded when they are first needed: the same program runs on hosts that have none.
//!
//! Only what a library exports is looked up here. What the headers do inline (post, poll) goes through the tables of an
//! opened device, and `rdma-sys` has it.

use std::io;
use std::sync::OnceLock;

use libc::{c_int, c_void};
use rdma_sys::{
    ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr,
    ibv_gid, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, rdma_cm_event, rdma_cm_id,
    rdma_event_channel, rdma_port_space,
};

/// Declares a library's functions, with the types of its header, and how they are looked up.
macro_rules! functions {
    (
        $(#[$about:meta])*
        $library:ident, $file:literal, $package:literal, $prefix:literal;
        $($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        pub(super) struct $library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Keeps them where they are.
            _library: libloading::Library,
        }

        impl $library {
            fn load() -> io::Result<Self> {
                let failed = |error: libloading::Error| {
                    let why = concat!($file, " cannot be loaded");
                    let what_next = concat!("install rdma-core (Debian: ", $package, ")");
                    io::Error::new(io::ErrorKind::NotFound, format!("{why} ({error}); {what_next}"))
                };
                // SAFETY: rule 5: loading it runs nothing but its own start.
                let library = unsafe { libloading::Library::new($file) }.map_err(failed)?;
                Ok(Self {
                    $(
                        // SAFETY: rule 5: the type is that of the library's header.
                        $name: *unsafe { library.get(concat!($prefix, stringify!($name), "\0").as_bytes()) }
                            .map_err(failed)?,
                    )*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    /// Functions of libibverbs. Each field is the function `ibv_` and its name.
    Library, "libibverbs.so.1", "ibverbs-providers", "ibv_";
    get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list: fn(*mut *mut ibv_device);
    get_device_name: fn(*mut ibv_device) -> *const libc::c_char;
    open_device: fn(*mut ibv_device) -> *mut ibv_context;
    close_device: fn(*mut ibv_context) -> c_int;
    query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    // Fills in a shorter structure that begins like this one.
    query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    get_async_event: fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
    ack_async_event: fn(*mut ibv_async_event);
    alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd: fn(*mut ibv_pd) -> c_int;
    reg_mr: fn(*mut ibv_pd, *mut c_void, libc::size_t, c_int) -> *mut ibv_mr;
    dereg_mr: fn(*mut ibv_mr) -> c_int;
    create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
    create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq: fn(*mut ibv_cq) -> c_int;
    get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events: fn(*mut ibv_cq, libc::c_uint);
    create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp: fn(*mut ibv_qp) -> c_int;
    create_ah: fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    destroy_ah: fn(*mut ibv_ah) -> c_int;
    attach_mcast: fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    detach_mcast: fn(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
}

functions! {
    /// Functions of librdmacm. Each field is the function `rdma_` and its name.
    Cm, "librdmacm.so.1", "librdmacm1", "rdma_";
    create_event_channel: fn() -> *mut rdma_event_channel;
    destroy_event_channel: fn(*mut rdma_event_channel);
    create_id: fn(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space::Type) -> c_int;
    destroy_id: fn(*mut rdma_cm_id) -> c_int;
    bind_addr: fn(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
    join_multicast: fn(*mut rdma_cm_id, *mut libc::sockaddr, *mut c_void) -> c_int;
    leave_multicast: fn(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
    get_cm_event: fn(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
    ack_cm_event: fn(*mut rdma_cm_event) -> c_int;
}

static LOADED: OnceLock<Library> = OnceLock::new();
static LOADED_CM: OnceLock<Cm> = OnceLock::new();

/// libibverbs, loaded if it was not yet. One that was not there is looked for again by the next call.
///
/// # Errors
/// What the loader says.
pub(super) fn load() -> io::Result<&'static Library> {
    if let Some(loaded) = LOADED.get() {
        return Ok(loaded);
    }
    let library = Library::load()?;
    Ok(LOADED.get_or_init(|| library))
}

/// libibverbs, for who has an object of it.
pub(super) fn library() -> &'static Library {
    LOADED.get().expect("an object of the library exists, so it was loaded")
}

/// librdmacm, likewise.
///
/// # Errors
/// What the loader says.
pub(super) fn load_cm() -> io::Result<&'static Cm> {
    if let Some(loaded) = LOADED_CM.get() {
        return Ok(loaded);
    }
    let library = Cm::load()?;
    Ok(LOADED_CM.get_or_init(|| library))
}
