//! The instance types, keys and PCI aliases that requests may name: what ships, and what operators define in TOML.
//!
//! ```toml
//! [types."g1.large"]                  # an instance type is a request; it may name others
//! description = "Two GPUs below one PCIe root with an adapter each"
//! request = "m1.large; xpus=2; hcas=2; gpu_hca_affinity=root"
//!
//! [keys.rack]                         # a key for a label of nodes: rack=r7
//! label = "rack"
//! [keys.nvlink]                       # for a trait: nvlink=yes, nvlink=no
//! trait = "CUSTOM_NVLINK"
//! [keys.accelerators]                 # another name of a key: accelerators>=2
//! key = "xpus"
//! [keys.network]                      # a choice, each word of which stands for a request: network=fast
//! values = { fast = "net_arch=infiniband; net_mbps>=100000", slow = "net_mbps>=10000" }
//!
//! [aliases.l40]                       # an alias of pci_passthrough:alias
//! counts = "xpus"
//! with = "xpu_vendor=nvidia; xpu_arch=ada"
//! ```

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};
use vmove_types::typo;

use super::clause::clause;
use super::{Clause, Expr, Key, Op, RequestError};

/// How often an instance type may stand for another one that stands for another one.
pub(super) const DEEPEST: usize = 16;
/// Names in messages; all others are behind `vmove place --types`.
const NAMED: usize = 24;

/// An instance type, as operators write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TypeText {
    /// The request that it stands for.
    pub request: String,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

/// A key, as operators write it. Exactly one of `key`, `label`, `trait` and `values` is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyText {
    /// It is another name of this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// It is a label of nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// It is a trait of nodes or devices: `yes` requires it, `no` forbids it.
    #[serde(default, rename = "trait", skip_serializing_if = "Option::is_none")]
    pub trait_: Option<String>,
    /// The requests that its values stand for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, String>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

/// An alias of `pci_passthrough:alias`, as operators write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AliasText {
    /// The key for the number of such devices: `xpus`, `hcas` or `vfs`.
    pub counts: String,
    /// Further conditions on them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with: Option<String>,
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

/// A definition, and where it is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Defined<T, M> {
    /// As it is written.
    pub text: T,
    /// The file; none for what ships.
    pub file: Option<String>,
    /// What it means.
    pub(super) meaning: M,
}

/// What a key of an operator means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum KeyMeaning {
    Key(Key),
    Trait(String),
    Values(BTreeMap<String, Expr>),
}

/// What an alias means: the key that counts, and further conditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AliasMeaning {
    pub counts: Key,
    pub with: Option<Expr>,
}

/// An instance type.
pub type InstanceType = Defined<TypeText, Expr>;

/// See the [module](self).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catalog {
    pub(super) types: BTreeMap<String, InstanceType>,
    pub(super) keys: BTreeMap<String, Defined<KeyText, KeyMeaning>>,
    pub(super) aliases: BTreeMap<String, Defined<AliasText, AliasMeaning>>,
}

impl Default for Catalog {
    /// What ships.
    fn default() -> Self {
        static SHIPPED: LazyLock<Catalog> = LazyLock::new(|| {
            Catalog::shipped().unwrap_or_else(|mistakes| unreachable!("a test reads them: {mistakes}"))
        });
        SHIPPED.clone()
    }
}

impl Catalog {
    /// Without anything.
    pub(super) fn empty() -> Self {
        Self { types: BTreeMap::new(), keys: BTreeMap::new(), aliases: BTreeMap::new() }
    }

    /// All instance types, by name.
    #[must_use]
    pub fn types(&self) -> &BTreeMap<String, InstanceType> {
        &self.types
    }

    /// The definitions of all keys of operators, each with its file.
    pub fn keys(&self) -> impl Iterator<Item = (&str, &KeyText, Option<&str>)> {
        self.keys.iter().map(|(name, key)| (name.as_str(), &key.text, key.file.as_deref()))
    }

    /// The definitions of all aliases, each with its file.
    pub fn aliases(&self) -> impl Iterator<Item = (&str, &AliasText, Option<&str>)> {
        self.aliases.iter().map(|(name, alias)| (name.as_str(), &alias.text, alias.file.as_deref()))
    }

    /// The request that an instance type stands for.
    pub(super) fn type_named(&self, name: &str, place: &str) -> Result<&Expr, RequestError> {
        self.types.get(name).map(|found| &found.meaning).ok_or_else(|| {
            RequestError::syntax(
                place,
                format!("unknown instance type {name:?}"),
                format!(
                    "{}{}",
                    one_of(&self.types, " (vmove place --types lists all)"),
                    near(name, self.types.keys().map(String::as_str))
                ),
            )
        })
    }

    /// An alias of `pci_passthrough:alias`.
    pub(super) fn alias(&self, name: &str, place: &str) -> Result<&AliasMeaning, RequestError> {
        self.aliases.get(name).map(|found| &found.meaning).ok_or_else(|| {
            RequestError::syntax(
                place,
                format!("unknown alias {name:?}"),
                format!(
                    "{}{}",
                    one_of(&self.aliases, ", or one that [aliases] of a file in instance-types defines"),
                    near(name, self.aliases.keys().map(String::as_str))
                ),
            )
        })
    }

    /// The meaning of a key that operators have defined.
    pub(super) fn own_key(&self, name: &str) -> Option<&KeyMeaning> {
        self.keys.get(&name.to_ascii_lowercase()).map(|found| &found.meaning)
    }

    /// All names of keys, for messages.
    pub(super) fn known_keys(&self) -> String {
        let own: Vec<&str> = self.keys.keys().map(String::as_str).take(NAMED).collect();
        let own = if own.is_empty() { String::new() } else { format!(", {}", own.join(", ")) };
        format!("{}{own}", Key::known())
    }

    /// The key that `name` was probably meant to be, for messages.
    pub(super) fn nearest_key(&self, name: &str) -> String {
        let built_in = Key::names().map(|known| -> &str { known });
        near(name, built_in.chain(self.keys.keys().map(String::as_str)))
    }

    /// What `NAME op VALUE` means.
    pub(super) fn condition(
        &self,
        name: &str,
        op: &str,
        value: &str,
        place: String,
    ) -> Result<Expr, RequestError> {
        if let Some(key) = Key::find(name) {
            return clause(key, op, value, place).map(Expr::Is);
        }
        match self.own_key(name) {
            None => {
                let expected = format!("{}{}", self.known_keys(), self.nearest_key(name));
                Err(RequestError::syntax(place, format!("unknown key {name:?}"), expected))
            }
            Some(KeyMeaning::Key(key)) => clause(key.clone(), op, value, place).map(Expr::Is),
            Some(KeyMeaning::Trait(wanted)) => {
                let word = match (op, value.to_ascii_lowercase().as_str()) {
                    ("=" | "==", "yes" | "true" | "required") | ("!=", "no" | "false") => "required",
                    ("=" | "==", "no" | "false" | "forbidden") | ("!=", "yes" | "true") => "forbidden",
                    _ => {
                        let found = format!("{name} {op} {value}");
                        return Err(RequestError::syntax(place, found, format!("{name}=yes or {name}=no")));
                    }
                };
                let key = Key::Trait(wanted.clone());
                Ok(Expr::Is(Clause { key, op: Op::AllOf(vec![word.to_owned()]), place }))
            }
            Some(KeyMeaning::Values(values)) => {
                let meaning = values.get(value).filter(|_| matches!(op, "=" | "=="));
                meaning.cloned().map(|meaning| meaning.at(&place)).ok_or_else(|| {
                    let words: Vec<String> = values.keys().map(|word| format!("{name}={word}")).collect();
                    RequestError::syntax(place, format!("{name} {op} {value}"), words.join(", "))
                })
            }
        }
    }
}

/// The known name that `name` was probably meant to be, for the end of messages.
fn near<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> String {
    typo::nearest(name, known).map(|near| format!("; did you mean {near:?}?")).unwrap_or_default()
}

fn one_of<T>(named: &BTreeMap<String, T>, more: &str) -> String {
    let names: Vec<&str> = named.keys().map(String::as_str).take(NAMED).collect();
    let dots = if named.len() > NAMED { ", …" } else { "" };
    format!("one of {}{dots}{more}", names.join(", "))
}
