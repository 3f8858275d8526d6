//! In which order a pass visits the pages: each page exactly once, one after the other or scattered.

use crate::pattern::mix;

/// How a pass goes over the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// By page number.
    Sequential,
    /// Scattered, in another way on each pass.
    Random,
}

/// One pass over `pages` pages. A permutation, so that after pass `n` every page was visited `n` times.
#[derive(Debug, Clone)]
pub struct Pass {
    order: Order,
    pages: u32,
    next: u32,
    // Scattering permutes 0..=mask, the next power of two, and skips what lies beyond the last page.
    mask: u32,
    shift: u32,
    keys: [u32; 3],
}

impl Pass {
    /// Pass number `number` over `pages` pages. Differs between passes and between `seed`s.
    #[must_use]
    pub fn new(order: Order, pages: u32, seed: u64, number: u64) -> Self {
        let bits = u32::BITS - pages.saturating_sub(1).leading_zeros();
        let mask = if bits == 0 { 0 } else { u32::MAX >> (u32::BITS - bits) };
        let key = |i: u64| (mix(seed ^ number.wrapping_mul(8) ^ i) >> 32) as u32;
        Self { order, pages, next: 0, mask, shift: bits.div_ceil(2), keys: [key(1), key(2) | 1, key(3) | 1] }
    }

    /// Pages that this pass has still to visit, counted before those that scattering skips.
    #[must_use]
    pub const fn done(&self) -> bool {
        match self.order {
            Order::Sequential => self.next >= self.pages,
            Order::Random => self.pages == 0 || self.next > self.mask,
        }
    }

    /// A bijection of `0..=mask`: adding, multiplying by an odd number and folding the upper half onto the lower are
    /// each reversible there.
    #[inline]
    const fn scatter(&self, x: u32) -> u32 {
        let mut x = (x ^ self.keys[0]) & self.mask;
        x = x.wrapping_mul(self.keys[1]) & self.mask;
        x ^= x >> self.shift;
        x = x.wrapping_mul(self.keys[2]) & self.mask;
        x ^ (x >> self.shift)
    }
}

impl Iterator for Pass {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        while !self.done() {
            let page = match self.order {
                Order::Sequential => self.next,
                Order::Random => self.scatter(self.next),
            };
            self.next += 1;
            if page < self.pages {
                return Some(page);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pass_visits_every_page_once() {
        for order in [Order::Sequential, Order::Random] {
            for pages in [0, 1, 2, 3, 7, 8, 9, 1000, 4096, 131_071] {
                let mut visits = vec![0; pages as usize];
                Pass::new(order, pages, 42, 3).for_each(|p| visits[p as usize] += 1);
                assert!(visits.iter().all(|v| *v == 1), "{order:?} over {pages} pages");
            }
        }
    }

    #[test]
    fn random_passes_differ_and_are_not_in_order() {
        let pass = |number| Pass::new(Order::Random, 4096, 42, number).collect::<Vec<_>>();
        assert_ne!(pass(0), pass(1));
        let neighbours = pass(0).windows(2).filter(|w| w[0].abs_diff(w[1]) == 1).count();
        assert!(neighbours < 64, "{neighbours} of 4095 steps go to a neighbour");
    }
}
