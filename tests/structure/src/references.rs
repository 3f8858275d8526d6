//! Which module knows of which: every path in the code that leads to another module of the crate.

use std::path::PathBuf;

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{ImplItem, Item, ItemUse, Macro};

use crate::modules::{ModulePath, Tree, brought_by, only_in_tests};

/// A path in one module that leads to another.
#[derive(Debug, Clone)]
pub struct Edge {
    pub from: ModulePath,
    pub to: ModulePath,
    pub file: PathBuf,
    pub line: usize,
    /// The path as written.
    pub written: String,
}

/// All of a crate, but those between a module and one that is inside of it.
pub fn all(tree: &Tree) -> Vec<Edge> {
    let mut edges = Vec::new();
    for number in 0..tree.modules.len() {
        let mut search = Search { tree, module: number, edges: &mut edges };
        tree.modules[number].items.iter().for_each(|item| search.visit_item(item));
    }
    edges.retain(|edge| !edge.from.starts_with(&edge.to) && !edge.to.starts_with(&edge.from));
    edges
}

struct Search<'a> {
    tree: &'a Tree,
    module: usize,
    edges: &'a mut Vec<Edge>,
}

impl Search<'_> {
    fn found(&mut self, written: &[String], span: Span) {
        let Some(path) = self.tree.absolute(self.module, written) else { return };
        let Some(to) = self.tree.home(&path) else { return };
        let here = &self.tree.modules[self.module];
        self.edges.push(Edge {
            from: here.path.clone(),
            to: self.tree.modules[to].path.clone(),
            file: here.file.clone(),
            line: span.start().line,
            written: written.join("::"),
        });
    }

    /// Macros hide their paths from the parser: each run of words joined by `::`.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut run: Vec<String> = Vec::new();
        let mut begin = Span::call_site();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.end_of(&mut run, begin);
                        begin = ident.span();
                    }
                    run.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.end_of(&mut run, begin);
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.tokens(group.stream());
                    }
                }
            }
        }
        self.end_of(&mut run, begin);
    }

    fn end_of(&mut self, run: &mut Vec<String>, begin: Span) {
        if run.len() > 1 {
            self.found(run, begin);
        }
        run.clear();
    }
}

impl<'ast> Visit<'ast> for Search<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !only_in_tests(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            ImplItem::Type(item) => &item.attrs,
            ImplItem::Macro(item) => &item.attrs,
            _ => return visit::visit_impl_item(self, item),
        };
        if !only_in_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_some() {
            return;
        }
        for brought in brought_by(&item.tree) {
            self.found(&brought.path, item.use_token.span);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let written: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
            self.found(&written, path.segments[0].ident.span());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        visit::visit_macro(self, call);
        self.tokens(call.tokens.clone());
    }
}

fn attributes(item: &Item) -> &[syn::Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Edges of a crate of these files, as `FROM -> TO LINE`.
    fn edges(files: &[(&str, &str)]) -> Vec<String> {
        let dir = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("makes it");
            std::fs::write(path, text).expect("writes");
        }
        let tree = Tree::read(&dir.path().join("lib.rs")).expect("a crate");
        let told = |edge: &Edge| format!("{} -> {} {}", edge.from.join("::"), edge.to.join("::"), edge.line);
        let mut all: Vec<String> = all(&tree).iter().map(told).collect();
        all.sort();
        all.dedup();
        all
    }

    #[test]
    fn uses_paths_and_macros_are_seen_and_strangers_are_not() {
        let found = edges(&[
            ("lib.rs", "mod a;\nmod b { pub fn f() {}\n pub mod inner { pub struct S; } }\nmod c;\n"),
            (
                "a.rs",
                "use std::fmt;\nuse crate::b;\nfn g() {\n  b::f();\n  super::c::h();\n  println!(\"{}\", crate::c::N);\n}\n",
            ),
            ("c/mod.rs", "pub const N: u8 = 1;\npub fn h() -> Option<super::b::inner::S> { None }\nmod d;\n"),
            ("c/d.rs", "use super::N;\nuse super::super::a::g;\n"),
        ]);
        assert_eq!(found, ["a -> b 2", "a -> b 4", "a -> c 5", "a -> c 6", "c -> b::inner 2", "c::d -> a 2"]);
    }

    #[test]
    fn what_is_re_exported_leads_to_where_it_is_written() {
        let found = edges(&[
            ("lib.rs", "mod a;\nmod b;\nmod c;\npub use a::A;\npub use b::*;\n"),
            ("a.rs", "pub struct A;\n"),
            ("b.rs", "pub struct B;\n"),
            ("c.rs", "use crate::A;\nuse crate::{B, c};\n"),
        ]);
        assert_eq!(found, ["c -> a 1", "c -> b 2"]);
    }

    #[test]
    fn tests_do_not_count() {
        let found = edges(&[
            ("lib.rs", "mod a;\nmod b;\n#[cfg(test)]\nmod t;\n"),
            ("a.rs", "#[cfg(test)]\nuse crate::b::f;\n#[cfg(test)]\nmod tests { use crate::b::f; }\n"),
            ("b.rs", "pub fn f() {}\nstruct S;\nimpl S {\n  #[cfg(test)]\n  fn g() { crate::a::x(); }\n}\n"),
        ]);
        assert_eq!(found, Vec::<String>::new());
    }
}
