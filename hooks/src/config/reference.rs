//! The page of the keys of `[[hook]]`.

use vmove_skip::installed::is_current;
use vmove_skip::reference::{keys_page, type_named};

use super::{ActionEntry, ForkEntry, HookEntry, IfItFails, MigrateEntry, OneOrMore, TemplateEntry};

/// `VMOVE_WRITE_DOCS=1 cargo test -p vmove-hooks --lib the_checked_in` writes it.
#[test]
fn the_checked_in_page_of_keys_is_current() {
    let types = [
        type_named::<HookEntry>(),
        type_named::<ActionEntry>(),
        type_named::<MigrateEntry>(),
        type_named::<ForkEntry>(),
        type_named::<TemplateEntry>(),
        type_named::<IfItFails>(),
        type_named::<OneOrMore>(),
    ];
    let about = "`[[hook]]` in the configuration of `vmoved` is a [Hook](#hook): [Hooks](../hooks.md) says which events there are, and what conditions and patterns look like.";
    let page = keys_page("Keys of hooks", about, &types);
    is_current("docs/reference/hooks.md", page.as_bytes(), "vmove-hooks");
}
