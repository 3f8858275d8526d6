//! Reads the definitions of a [`Catalog`], and finds every mistake in them.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use vmove_types::typo;

use super::catalog::{AliasMeaning, AliasText, Catalog, DEEPEST, Defined, KeyMeaning, KeyText, TypeText};
use super::{Expr, Key, Op, RequestError, instance, lower};
use crate::unreadable::Unreadable;

/// Most bytes of one file.
pub const LARGEST_FILE: usize = 1 << 20;
/// Most definitions of all files.
const MOST: usize = 10_000;
/// Longest name.
const LONGEST_NAME: usize = 64;

/// A file with definitions.
#[derive(Debug, Clone)]
pub struct Source {
    /// Its name, for messages; none for what ships.
    pub name: Option<String>,
    /// Its text.
    pub text: String,
}

/// A mistake in a definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The file.
    pub file: String,
    /// The line, from 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong, and what was expected.
    pub reason: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.file, self.reason),
            line => write!(f, "{}:{line}: {}", self.file, self.reason),
        }
    }
}

/// All mistakes in the definitions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
pub struct CatalogError(pub Vec<Mistake>);

/// A file, each definition still as it is.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    types: BTreeMap<String, Spanned<toml::Value>>,
    #[serde(default)]
    keys: BTreeMap<String, Spanned<toml::Value>>,
    #[serde(default)]
    aliases: BTreeMap<String, Spanned<toml::Value>>,
}

/// A definition and its place.
struct At<T> {
    text: T,
    file: usize,
    line: usize,
}

struct Reader<'a> {
    sources: &'a [Source],
    mistakes: Vec<Mistake>,
}

impl Catalog {
    /// What ships, without definitions of operators.
    pub(super) fn shipped() -> Result<Self, CatalogError> {
        Self::read_all(&[Source { name: None, text: include_str!("shipped.toml").to_owned() }])
    }

    /// What ships, and the definitions in these files. A definition of a file takes the place of one of that name that ships.
    ///
    /// # Errors
    /// Every mistake, with its file and line: text that is not TOML, unknown fields, names that two files define, requests that cannot be
    /// read or contradict themselves, instance types that do not exist or stand for each other in a circle, files above
    /// [`LARGEST_FILE`].
    pub fn read(files: &[Source]) -> Result<Self, CatalogError> {
        let mut sources = vec![Source { name: None, text: include_str!("shipped.toml").to_owned() }];
        sources.extend_from_slice(files);
        Self::read_all(&sources)
    }

    /// What another process has read, as it is written.
    ///
    /// # Errors
    /// As [`Catalog::read`].
    pub fn of(
        types: BTreeMap<String, TypeText>,
        keys: BTreeMap<String, KeyText>,
        aliases: BTreeMap<String, AliasText>,
    ) -> Result<Self, CatalogError> {
        fn placed<T>(texts: BTreeMap<String, T>) -> BTreeMap<String, At<T>> {
            texts.into_iter().map(|(name, text)| (name, At { text, file: 0, line: 0 })).collect()
        }
        let sources = [Source { name: Some("the bridge's instance types".to_owned()), text: String::new() }];
        let reader = Reader { sources: &sources, mistakes: Vec::new() };
        reader.build(placed(types), placed(keys), placed(aliases))
    }

    fn read_all(sources: &[Source]) -> Result<Self, CatalogError> {
        let mut reader = Reader { sources, mistakes: Vec::new() };
        let (mut types, mut keys, mut aliases) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for number in 0..sources.len() {
            let Some(file) = reader.file(number) else { continue };
            reader.collect::<TypeText>(number, "type", file.types, &mut types);
            reader.collect::<KeyText>(number, "key", file.keys, &mut keys);
            reader.collect::<AliasText>(number, "alias", file.aliases, &mut aliases);
        }
        if types.len() + keys.len() + aliases.len() > MOST {
            reader.say(sources.len() - 1, 0, format!("more than {MOST} definitions in all files"));
            return Err(CatalogError(reader.mistakes));
        }
        reader.build(types, keys, aliases)
    }
}

impl Reader<'_> {
    /// The catalog of these definitions, unless there are mistakes.
    fn build(
        mut self,
        types: BTreeMap<String, At<TypeText>>,
        keys: BTreeMap<String, At<KeyText>>,
        aliases: BTreeMap<String, At<AliasText>>,
    ) -> Result<Catalog, CatalogError> {
        let mut catalog = Catalog::empty();
        // Keys first, since requests use them; they use only keys that are built in.
        for (name, at) in keys {
            let (file, line) = (at.file, at.line);
            let meaning = key_meaning(&name, &at.text).map_err(|error| error.to_string());
            if let Some(defined) = self.defined(at, &format!("key {name:?}"), meaning, file, line) {
                catalog.keys.insert(name.to_ascii_lowercase(), defined);
            }
        }
        for (name, at) in aliases {
            let (file, line) = (at.file, at.line);
            let meaning = alias_meaning(&at.text, &catalog).map_err(|error| error.to_string());
            if let Some(defined) = self.defined(at, &format!("alias {name:?}"), meaning, file, line) {
                catalog.aliases.insert(name, defined);
            }
        }
        let mut places = BTreeMap::new();
        for (name, at) in types {
            let (file, line) = (at.file, at.line);
            let outer = format!("instance type {name}");
            let meaning = instance::parse(&at.text.request, &catalog).map(|expr| expr.within(&outer));
            let meaning = meaning.map_err(|error| error.to_string());
            if let Some(defined) = self.defined(at, &format!("type {name:?}"), meaning, file, line) {
                places.insert(name.clone(), (file, line));
                catalog.types.insert(name, defined);
            }
        }
        self.check_types(&catalog, &places);
        if self.mistakes.is_empty() { Ok(catalog) } else { Err(CatalogError(self.mistakes)) }
    }

    fn name(&self, file: usize) -> String {
        self.sources[file].name.clone().unwrap_or_else(|| "shipped.toml".to_owned())
    }

    fn say(&mut self, file: usize, line: usize, reason: String) {
        let file = self.name(file);
        self.mistakes.push(Mistake { file, line, reason });
    }

    fn file(&mut self, number: usize) -> Option<File> {
        let text = &self.sources[number].text;
        if text.len() > LARGEST_FILE {
            let reason = format!("{} bytes; expected at most {LARGEST_FILE}", text.len());
            self.say(number, 0, reason);
            return None;
        }
        match toml::from_str(text) {
            Ok(file) => Some(file),
            Err(error) => {
                let expected = "tables [types.NAME], [keys.NAME] and [aliases.NAME]";
                let wrong = Unreadable::toml(text, &error, expected);
                self.say(number, wrong.line, format!("{}; expected {}", wrong.reason, wrong.expected));
                None
            }
        }
    }

    /// Adds the definitions of one kind in a file to all of that kind.
    fn collect<T: DeserializeOwned>(
        &mut self,
        number: usize,
        what: &str,
        found: BTreeMap<String, Spanned<toml::Value>>,
        all: &mut BTreeMap<String, At<T>>,
    ) {
        for (name, value) in found {
            let line = line(&self.sources[number].text, value.span().start);
            let usable = name.len() <= LONGEST_NAME
                && name.starts_with(|first: char| first.is_ascii_alphanumeric())
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
            if !usable || name.eq_ignore_ascii_case("or") {
                let expected = format!(
                    "1 to {LONGEST_NAME} of A-Z a-z 0-9 . _ -, of which the first is a letter or a digit, and not OR"
                );
                self.say(number, line, format!("{what} {name:?}: not a name; expected {expected}"));
                continue;
            }
            let text = match value.into_inner().try_into::<T>() {
                Ok(text) => text,
                Err(error) => {
                    let reason = typo::hinted(error.message().trim());
                    let line = typo::unknown(&reason)
                        .and_then(|key| line_of_key(&self.sources[number].text, line, key))
                        .unwrap_or(line);
                    self.say(number, line, format!("{what} {name:?}: {reason}"));
                    continue;
                }
            };
            match all.get(&name) {
                // Operators may replace what ships.
                Some(known) if self.sources[known.file].name.is_some() => {
                    let (file, at) = (self.name(known.file), known.line);
                    self.say(
                        number,
                        line,
                        format!("{what} {name:?} is defined in {file}:{at} as well; expected it once"),
                    );
                }
                _ => drop(all.insert(name, At { text, file: number, line })),
            }
        }
    }

    /// A definition with its meaning; none, if it has none.
    fn defined<T, M>(
        &mut self,
        at: At<T>,
        what: &str,
        meaning: Result<M, String>,
        file: usize,
        line: usize,
    ) -> Option<Defined<T, M>> {
        match meaning {
            Ok(meaning) => Some(Defined { text: at.text, file: self.sources[file].name.clone(), meaning }),
            Err(reason) => {
                self.say(file, line, format!("{what}: {reason}"));
                None
            }
        }
    }

    /// Each instance type exists, stands for no circle, and is a whole request.
    fn check_types(&mut self, catalog: &Catalog, places: &BTreeMap<String, (usize, usize)>) {
        for (name, (file, line)) in places {
            let Some(own) = catalog.types.get(name) else { continue };
            let checked = chain(catalog, name).and_then(|()| {
                lower::alternatives(&own.meaning, catalog).map(drop).map_err(|error| error.to_string())
            });
            if let Err(reason) = checked {
                self.say(*file, *line, format!("type {name:?}: {reason}"));
            }
        }
    }
}

/// Follows the instance types that one stands for.
fn chain(catalog: &Catalog, start: &str) -> Result<(), String> {
    // Each path is short, and each name is followed once from here.
    let mut seen = std::collections::BTreeSet::new();
    let mut open = vec![vec![start.to_owned()]];
    while let Some(path) = open.pop() {
        let Some(last) = path.last() else { continue };
        let Some(found) = catalog.types.get(last) else { continue };
        for next in found.meaning.types() {
            let mut longer = path.clone();
            longer.push(next.to_owned());
            if next == start {
                return Err(format!("it stands for itself: {}; expected no circle", longer.join(" -> ")));
            }
            if longer.len() > DEEPEST {
                return Err(format!(
                    "it stands for {} -> …; expected at most {DEEPEST} types, one for the other",
                    longer[..4].join(" -> ")
                ));
            }
            if seen.insert(next.to_owned()) {
                open.push(longer);
            }
        }
    }
    Ok(())
}

fn key_meaning(name: &str, text: &KeyText) -> Result<KeyMeaning, RequestError> {
    let place = "definition";
    if Key::find(name).is_some() {
        return Err(RequestError::syntax(place, "a built-in key has this name", "another name"));
    }
    let given = usize::from(text.key.is_some())
        + usize::from(text.label.is_some())
        + usize::from(text.trait_.is_some())
        + usize::from(!text.values.is_empty());
    if given != 1 {
        return Err(RequestError::syntax(
            place,
            format!("{given} of key, label, trait and values are given"),
            "exactly one",
        ));
    }
    if let Some(key) = &text.key {
        let found = Key::find(key).filter(|key| *key != Key::Flavor);
        let found =
            found.ok_or_else(|| RequestError::syntax(place, format!("key = {key:?}"), Key::known()))?;
        return Ok(KeyMeaning::Key(found));
    }
    if let Some(label) = &text.label {
        return named(label).map(|label| KeyMeaning::Key(Key::Label(label.to_owned())));
    }
    if let Some(wanted) = &text.trait_ {
        return named(wanted).map(|wanted| KeyMeaning::Trait(wanted.to_ascii_uppercase()));
    }
    let built_in = Catalog::empty();
    let mut values = BTreeMap::new();
    for (word, request) in &text.values {
        if word.is_empty() || word.contains(|c: char| c.is_whitespace() || "=!<>;(),".contains(c)) {
            return Err(RequestError::syntax(
                place,
                format!("value {word:?}"),
                "a word without spaces and =!<>;(),",
            ));
        }
        let expr = instance::parse(request, &built_in).and_then(|expr| without_types(expr, place));
        values.insert(word.clone(), expr.map_err(|error| error.within(&format!("value {word:?}")))?);
    }
    Ok(KeyMeaning::Values(values))
}

fn named(text: &str) -> Result<&str, RequestError> {
    if text.is_empty() || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(RequestError::syntax("definition", format!("{text:?}"), "a name without spaces"));
    }
    Ok(text)
}

fn without_types(expr: Expr, place: &str) -> Result<Expr, RequestError> {
    match expr.types().first() {
        None => Ok(expr),
        Some(name) => {
            let found = format!("{name:?}, which is no condition");
            Err(RequestError::syntax(place, found, "KEY=VALUE with built-in keys"))
        }
    }
}

fn alias_meaning(text: &AliasText, catalog: &Catalog) -> Result<AliasMeaning, RequestError> {
    let counts = Key::find(&text.counts).filter(|key| matches!(key, Key::Gpus | Key::Hcas | Key::Vfs));
    let counts = counts
        .ok_or_else(|| RequestError::syntax("counts", format!("{:?}", text.counts), "xpus, hcas or vfs"))?;
    let parse = |with: &str| {
        let expr = instance::parse(with, catalog)?.within("with");
        without_types(expr, "with")
    };
    Ok(AliasMeaning { counts, with: text.with.as_deref().map(parse).transpose()? })
}

fn line(text: &str, at: usize) -> usize {
    text.get(..at).map_or(0, |before| before.matches('\n').count() + 1)
}

/// The line of a key in the table of a definition that begins on a line, if it has one for itself.
fn line_of_key(text: &str, begin: usize, key: &str) -> Option<usize> {
    let below = text.lines().enumerate().skip(begin);
    let mut own = below.take_while(|(_, line)| !line.trim_start().starts_with('['));
    let is = |line: &str| {
        let rest = line.trim_start().strip_prefix(key);
        rest.is_some_and(|rest| rest.trim_start().starts_with('='))
    };
    own.find(|(_, line)| is(line)).map(|(at, _)| at + 1)
}

impl Expr {
    /// The same conditions, whose places are those of a text that `outer` names.
    pub(super) fn within(self, outer: &str) -> Self {
        self.map(&|place| format!("{outer}, {place}"))
    }

    /// The same conditions at another place.
    pub(super) fn at(self, place: &str) -> Self {
        self.map(&|_| place.to_owned())
    }

    fn map(self, change: &impl Fn(&str) -> String) -> Self {
        let all = |parts: Vec<Self>| parts.into_iter().map(|part| part.map(change)).collect();
        match self {
            Self::All(parts) => Self::All(all(parts)),
            Self::Any(parts) => Self::Any(all(parts)),
            Self::Is(mut clause) => {
                clause.place = change(&clause.place);
                Self::Is(clause)
            }
        }
    }

    /// The instance types that it names.
    pub(super) fn types(&self) -> Vec<&str> {
        match self {
            Self::All(parts) | Self::Any(parts) => parts.iter().flat_map(Self::types).collect(),
            Self::Is(clause) if clause.key == Key::Flavor => match &clause.op {
                Op::OneOf(names) | Op::AllOf(names) => names.iter().map(String::as_str).collect(),
                _ => Vec::new(),
            },
            Self::Is(_) => Vec::new(),
        }
    }
}
