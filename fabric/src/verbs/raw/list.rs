//! Requests as the library takes them: each names its one entry and the request that follows.

use rdma_sys::{ibv_recv_wr, ibv_send_wr, ibv_sge};

/// A request to send or to receive.
pub(super) trait Request: Sized {
    /// Its entry, and the request that follows it.
    fn set(&mut self, entry: *mut ibv_sge, next: *mut Self);
}

impl Request for ibv_send_wr {
    fn set(&mut self, entry: *mut ibv_sge, next: *mut Self) {
        (self.sg_list, self.next) = (entry, next);
    }
}

impl Request for ibv_recv_wr {
    fn set(&mut self, entry: *mut ibv_sge, next: *mut Self) {
        (self.sg_list, self.next) = (entry, next);
    }
}

/// Links requests in order, the first with the first entry and so on; the last is followed by none. There are as many of one as
/// of the other, and they stay where they are until the library has taken the list. The first.
pub(super) fn link<R: Request>(requests: &mut [R], entries: &mut [ibv_sge]) -> *mut R {
    let (first, entry) = (requests.as_mut_ptr(), entries.as_mut_ptr());
    let count = requests.len().min(entries.len());
    for (index, request) in requests.iter_mut().take(count).enumerate() {
        let next = if index + 1 < count { first.wrapping_add(index + 1) } else { std::ptr::null_mut() };
        request.set(entry.wrapping_add(index), next);
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_names_its_entry_and_the_next() {
        let entry = ibv_sge { addr: 0, length: 0, lkey: 0 };
        let empty = || ibv_recv_wr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 1,
        };
        let (mut requests, mut entries) = ([empty(), empty(), empty()], [entry; 3]);
        let first = link(&mut requests, &mut entries);
        let at = |index: usize| first.wrapping_add(index);
        assert_eq!(first, requests.as_mut_ptr());
        assert_eq!(requests.each_ref().map(|r| r.next), [at(1), at(2), std::ptr::null_mut()]);
        let entry = entries.as_mut_ptr();
        let own = [entry, entry.wrapping_add(1), entry.wrapping_add(2)];
        assert_eq!(requests.each_ref().map(|r| r.sg_list), own);
    }
}
