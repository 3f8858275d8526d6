//! libibverbs, loaded when it is first needed: the same program runs on hosts that have none.
//!
//! Only what the library exports is looked up here. What its headers do inline (post, poll) goes through the tables of an
//! opened device, and `rdma-sys` has it.

use std::io;
use std::sync::OnceLock;

use libc::c_int;
use rdma_sys::{
    ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_mr, ibv_pd,
    ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
};

/// The name that a program linked with the library would ask for.
const NAME: &str = "libibverbs.so.1";

/// Declares the functions of the library, with the types of its header, and how they are looked up.
macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of the library. Each field is the function `ibv_` and its name.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Keeps them where they are.
            _library: libloading::Library,
        }

        impl Library {
            fn load() -> Result<Self, libloading::Error> {
                // SAFETY: rule 5: loading it runs nothing but its own start.
                let library = unsafe { libloading::Library::new(NAME) }?;
                Ok(Self {
                    // SAFETY: rule 5: the type is that of the library's header.
                    $($name: *unsafe { library.get(concat!("ibv_", stringify!($name), "\0").as_bytes()) }?,)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
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
    reg_mr: fn(*mut ibv_pd, *mut libc::c_void, libc::size_t, c_int) -> *mut ibv_mr;
    dereg_mr: fn(*mut ibv_mr) -> c_int;
    create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
    create_cq: fn(*mut ibv_context, c_int, *mut libc::c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    destroy_cq: fn(*mut ibv_cq) -> c_int;
    get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut libc::c_void) -> c_int;
    ack_cq_events: fn(*mut ibv_cq, libc::c_uint);
    create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp: fn(*mut ibv_qp) -> c_int;
}

static LOADED: OnceLock<Library> = OnceLock::new();

/// The library, loaded if it was not yet. One that was not there is looked for again by the next call.
///
/// # Errors
/// What the loader says.
pub(super) fn load() -> io::Result<&'static Library> {
    if let Some(loaded) = LOADED.get() {
        return Ok(loaded);
    }
    let library = Library::load().map_err(|error| {
        let why = format!("{NAME} cannot be loaded ({error}); install rdma-core (Debian: ibverbs-providers)");
        io::Error::new(io::ErrorKind::NotFound, why)
    })?;
    Ok(LOADED.get_or_init(|| library))
}

/// The library, for who has an object of it.
pub(super) fn library() -> &'static Library {
    LOADED.get().expect("an object of the library exists, so it was loaded")
}
