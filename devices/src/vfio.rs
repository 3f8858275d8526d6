//! The requests of VFIO that are needed here. The one place in this crate with `unsafe`.
#![allow(unsafe_code, reason = "ioctls")]

use std::ffi::{CString, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, Updater, ioctl, opcode};

// include/uapi/linux/vfio.h
const SET_IOMMU: Opcode = opcode::none(b';', 102);
const GROUP_SET_CONTAINER: Opcode = opcode::none(b';', 104);
const GROUP_GET_DEVICE_FD: Opcode = opcode::none(b';', 106);
const DEVICE_FEATURE: Opcode = opcode::none(b';', 117);
const TYPE1V2: usize = 3;
const FEATURE_GET: u32 = 1 << 16;
const FEATURE_PROBE: u32 = 1 << 18;
/// Feature: the device carries its state.
const MIGRATION: u32 = 1;
/// Feature: the device tells what it wrote.
const DMA_LOGGING_START: u32 = 6;

/// `struct vfio_device_feature` with the data of `vfio_device_feature_migration`.
#[repr(C)]
#[derive(Default)]
struct Feature {
    argsz: u32,
    flags: u32,
    data: u64,
}

/// What a device can, by its own word: the flags of `VFIO_DEVICE_FEATURE_MIGRATION` (`None`: nothing), and whether it logs its writes.
pub(crate) fn migration_flags(group: &File, container: &File, name: &str) -> io::Result<(Option<u64>, bool)> {
    // SAFETY: the request reads one int, a descriptor that is open until this returns.
    let request = unsafe { Setter::<GROUP_SET_CONTAINER, RawFd>::new(container.as_raw_fd()) };
    // SAFETY: as above.
    unsafe { ioctl(group, request) }?;
    // SAFETY: the request takes a number; the descriptor is that of a container, to which a group has just been added.
    unsafe { ioctl(container, SetIommu) }?;
    let name = CString::new(name).map_err(io::Error::other)?;
    // SAFETY: the request reads a text that ends with 0, and gives a new descriptor.
    let device = unsafe { ioctl(group, DeviceFd(&name)) }?;
    let mut feature = Feature { argsz: 16, flags: FEATURE_GET | MIGRATION, data: 0 };
    let flags = match feature_of(&device, &mut feature) {
        Ok(()) => Some(feature.data),
        // ENOTTY: it has none; EINVAL: kernels before 5.18 know no features of this kind.
        Err(rustix::io::Errno::NOTTY | rustix::io::Errno::INVAL) => None,
        Err(error) => return Err(error.into()),
    };
    let mut probe = Feature { argsz: 8, flags: FEATURE_PROBE | DMA_LOGGING_START | 1 << 17, data: 0 };
    Ok((flags, feature_of(&device, &mut probe).is_ok()))
}

fn feature_of(device: &OwnedFd, feature: &mut Feature) -> rustix::io::Result<()> {
    // SAFETY: the request reads and writes no more than argsz bytes, and the structure has 16.
    let request = unsafe { Updater::<DEVICE_FEATURE, Feature>::new(feature) };
    // SAFETY: as above.
    unsafe { ioctl(device, request) }
}

/// `VFIO_SET_IOMMU` with its number in place of a pointer.
struct SetIommu;

// SAFETY: the kernel takes the number as it is and touches no memory of ours.
unsafe impl Ioctl for SetIommu {
    type Output = ();
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        SET_IOMMU
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::without_provenance_mut(TYPE1V2)
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// `VFIO_GROUP_GET_DEVICE_FD` with the name of a device.
struct DeviceFd<'a>(&'a CString);

// SAFETY: the kernel reads the text up to its 0, and what it returns is a descriptor that nobody else has.
unsafe impl Ioctl for DeviceFd<'_> {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        GROUP_GET_DEVICE_FD
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.0.as_ptr().cast_mut().cast()
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the request succeeded, so this is a new descriptor, and it is ours.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}
