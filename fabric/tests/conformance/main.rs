//! What every back end must do, run on each of them.
#![allow(missing_docs, clippy::tests_outside_test_module)]

#[path = "../support/mod.rs"]
mod support;

/// Makes a test of each function for each back end.
macro_rules! on_every_fabric {
    ($($name:ident)*) => {
        $(mod $name {
            use crate::support::Kind;
            #[test]
            fn tcp() { super::$name(Kind::Tcp); }
            #[test]
            fn tls() { super::$name(Kind::Tls); }
            #[test]
            fn local() { super::$name(Kind::Local); }
            #[cfg(feature = "verbs")]
            #[test]
            fn verbs() {
                if !crate::support::skip_without_rdma() {
                    super::$name(Kind::Verbs);
                }
            }
        })*
    };
}

mod ends;
mod lifetime;
mod limits;
mod load;
mod shortened;
mod transfer;
#[cfg(feature = "verbs")]
mod verbs;
