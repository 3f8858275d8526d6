//! The tree of a crate's modules, and what each defines and brings into scope.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use syn::{Attribute, Item, Meta, UseTree};

/// Names of modules from the root of the crate on.
pub type ModulePath = Vec<String>;

/// A crate; the first module is its root.
pub struct Tree {
    pub modules: Vec<Module>,
    by_path: HashMap<ModulePath, usize>,
}

/// A module, without its children.
pub struct Module {
    pub path: ModulePath,
    pub file: PathBuf,
    pub items: Vec<Item>,
    /// Names of its items, without those that `use` brings.
    defined: HashSet<String>,
    /// Names that `use` brings, and what they stand for, as written.
    brought: HashMap<String, Vec<String>>,
    /// What `use ...::*` brings.
    globs: Vec<Vec<String>>,
}

/// One name that a `use` brings: the path as written, and the name; `None` for `*`.
#[derive(Debug, PartialEq, Eq)]
pub struct Brought {
    pub path: Vec<String>,
    pub name: Option<String>,
}

impl Tree {
    /// Reads a crate from its root file on.
    pub fn read(root: &Path) -> Result<Self> {
        let mut tree = Self { modules: Vec::new(), by_path: HashMap::new() };
        let folder = root.parent().context("a root without a folder")?;
        tree.read_file(root, folder, &[])?;
        Ok(tree)
    }

    /// A module by its path.
    pub fn find(&self, path: &[String]) -> Option<usize> {
        self.by_path.get(path).copied()
    }

    /// `folder`: where its children are.
    fn read_file(&mut self, file: &Path, folder: &Path, path: &[String]) -> Result<()> {
        let text =
            std::fs::read_to_string(file).with_context(|| format!("could not read {}", file.display()))?;
        let parsed = syn::parse_file(&text).with_context(|| format!("could not parse {}", file.display()))?;
        self.enter(file, folder, path, parsed.items)
    }

    fn enter(&mut self, file: &Path, folder: &Path, path: &[String], items: Vec<Item>) -> Result<()> {
        let number = self.modules.len();
        self.by_path.insert(path.to_vec(), number);
        let (children, items): (Vec<Item>, Vec<Item>) =
            items.into_iter().partition(|item| matches!(item, Item::Mod(_)));
        let mut module = Module {
            path: path.to_vec(),
            file: file.to_owned(),
            items,
            defined: HashSet::new(),
            brought: HashMap::new(),
            globs: Vec::new(),
        };
        module.list_names();
        self.modules.push(module);
        for child in children {
            let Item::Mod(child) = child else { continue };
            if only_in_tests(&child.attrs) {
                continue;
            }
            let name = child.ident.to_string();
            let path = [path, std::slice::from_ref(&name)].concat();
            if let Some((_, items)) = child.content {
                self.enter(file, &folder.join(&name), &path, items)?;
                continue;
            }
            let (file, folder) = match path_attribute(&child.attrs) {
                Some(named) => {
                    let file = file.parent().unwrap_or(Path::new(".")).join(named);
                    let folder = file.parent().unwrap_or(Path::new(".")).to_owned();
                    (file, folder)
                }
                None => {
                    let flat = folder.join(format!("{name}.rs"));
                    let nested = folder.join(&name).join("mod.rs");
                    let file = [flat, nested].into_iter().find(|file| file.is_file());
                    let Some(file) = file else { bail!("module {} has no file", path.join("::")) };
                    (file, folder.join(&name))
                }
            };
            self.read_file(&file, &folder, &path)?;
        }
        Ok(())
    }

    /// The path from the crate's root on of what is written in a module; nothing if that is of another crate.
    pub fn absolute(&self, module: usize, written: &[String]) -> Option<Vec<String>> {
        self.absolute_within(module, written, 0)
    }

    fn absolute_within(&self, module: usize, written: &[String], depth: usize) -> Option<Vec<String>> {
        let here = &self.modules[module];
        let (first, rest) = written.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => self.climb(&here.path, rest),
            "super" => self.climb(&here.path, written),
            // A name that means itself would be followed for ever.
            _ if depth > 8 => None,
            name => {
                let child = [here.path.clone(), vec![name.to_owned()]].concat();
                if self.find(&child).is_some() {
                    return Some([here.path.clone(), written.to_vec()].concat());
                }
                let stands_for = here.brought.get(name).filter(|path| path.first() != Some(first))?;
                let start = self.absolute_within(module, stands_for, depth + 1)?;
                Some([start, rest.to_vec()].concat())
            }
        }
    }

    /// A path that begins with as many `super` as it likes.
    fn climb(&self, from: &[String], written: &[String]) -> Option<Vec<String>> {
        let ups = written.iter().take_while(|word| *word == "super").count();
        let base = from.len().checked_sub(ups)?;
        Some([&from[..base], &written[ups..]].concat())
    }

    /// The module in which what an absolute path names is written down: re-exports are followed.
    pub fn home(&self, path: &[String]) -> Option<usize> {
        self.home_within(path, 0)
    }

    fn home_within(&self, path: &[String], depth: usize) -> Option<usize> {
        let known = (0..=path.len()).rev().find(|len| self.find(&path[..*len]).is_some())?;
        let number = self.find(&path[..known])?;
        let module = &self.modules[number];
        let Some(name) = path.get(known) else { return Some(number) };
        if depth > 8 || module.defined.contains(name) {
            return Some(number);
        }
        let follow = |written: &[String]| {
            let start = self.absolute(number, written)?;
            self.home_within(&[&start, &path[known + 1..]].concat(), depth + 1)
        };
        if let Some(found) = module.brought.get(name).and_then(|written| follow(written)) {
            return Some(found);
        }
        for glob in &module.globs {
            let Some(start) = self.absolute(number, glob) else { continue };
            let Some(from) = self.find(&start).filter(|from| *from != number) else { continue };
            let there = &self.modules[from];
            if there.defined.contains(name) || there.brought.contains_key(name) {
                return self.home_within(&[&start, &path[known..]].concat(), depth + 1);
            }
        }
        Some(number)
    }
}

impl Module {
    fn list_names(&mut self) {
        for item in &self.items {
            let ident = match item {
                Item::Const(item) => Some(&item.ident),
                Item::Enum(item) => Some(&item.ident),
                Item::Fn(item) => Some(&item.sig.ident),
                Item::Macro(item) => item.ident.as_ref(),
                Item::Static(item) => Some(&item.ident),
                Item::Struct(item) => Some(&item.ident),
                Item::Trait(item) => Some(&item.ident),
                Item::TraitAlias(item) => Some(&item.ident),
                Item::Type(item) => Some(&item.ident),
                Item::Union(item) => Some(&item.ident),
                _ => None,
            };
            self.defined.extend(ident.map(ToString::to_string));
            let Item::Use(item) = item else { continue };
            if item.leading_colon.is_some() || only_in_tests(&item.attrs) {
                continue;
            }
            for brought in brought_by(&item.tree) {
                match brought.name {
                    Some(name) => drop(self.brought.insert(name, brought.path)),
                    None => self.globs.push(brought.path),
                }
            }
        }
    }
}

/// Every name that a `use` brings.
pub fn brought_by(tree: &UseTree) -> Vec<Brought> {
    let mut found = Vec::new();
    flatten(tree, &mut Vec::new(), &mut found);
    found
}

fn flatten(tree: &UseTree, path: &mut Vec<String>, found: &mut Vec<Brought>) {
    let mut add = |path: &[String], last: String, name: Option<String>| {
        // `a::{self}` is `a`.
        let path = if last == "self" && !path.is_empty() { path.to_vec() } else { [path, &[last]].concat() };
        let name = name.or_else(|| path.last().cloned());
        found.push(Brought { path, name });
    };
    match tree {
        UseTree::Path(part) => {
            path.push(part.ident.to_string());
            flatten(&part.tree, path, found);
            path.pop();
        }
        UseTree::Name(part) => add(path, part.ident.to_string(), None),
        UseTree::Rename(part) => add(path, part.ident.to_string(), Some(part.rename.to_string())),
        UseTree::Glob(_) => found.push(Brought { path: path.clone(), name: None }),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, path, found)),
    }
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    })
}

/// Whether something exists in tests only.
pub fn only_in_tests(attributes: &[Attribute]) -> bool {
    let conditions = attributes.iter().filter(|attribute| attribute.path().is_ident("cfg"));
    conditions.filter_map(|attribute| attribute.parse_args::<Meta>().ok()).any(|meta| !may_hold(&meta))
}

/// Whether a condition can hold outside of tests; what is not known may.
fn may_hold(condition: &Meta) -> bool {
    let parts = |list: &syn::MetaList| -> Vec<Meta> {
        type Parts = syn::punctuated::Punctuated<Meta, syn::Token![,]>;
        list.parse_args_with(Parts::parse_terminated).into_iter().flatten().collect()
    };
    match condition {
        Meta::Path(path) => !path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => parts(list).iter().all(may_hold),
        Meta::List(list) if list.path.is_ident("any") => {
            let parts = parts(list);
            parts.is_empty() || parts.iter().any(may_hold)
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse<T: syn::parse::Parse>(text: &str) -> T {
        syn::parse_str(text).expect("Rust")
    }

    #[test]
    fn every_name_of_a_use_is_found() {
        let item: syn::ItemUse = parse("use crate::a::{self, b::{C as D, e::*}, f};");
        let told = |b: &Brought| format!("{}={}", b.name.as_deref().unwrap_or("*"), b.path.join("::"));
        let found: Vec<String> = brought_by(&item.tree).iter().map(told).collect();
        assert_eq!(found, ["a=crate::a", "D=crate::a::b::C", "*=crate::a::b::e", "f=crate::a::f"]);
    }

    #[test]
    fn conditions_that_hold_in_tests_only_are_known() {
        let only = |attribute: &str| {
            only_in_tests(&parse::<syn::ItemFn>(&format!("#[{attribute}] fn f() {{}}")).attrs)
        };
        assert!(only("cfg(test)"));
        assert!(only("cfg(all(test, unix))"));
        for other in ["cfg(any(test, unix))", "cfg(not(test))", "cfg(feature = \"test\")", "inline"] {
            assert!(!only(other), "{other}");
        }
    }
}
