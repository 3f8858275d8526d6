//! Entities, before they are rendered.

/// Kinds of entities that a fleet has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    AdminDomain,
    ComputingService,
    ComputingManager,
    ExecutionEnvironment,
}

impl Kind {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::AdminDomain => "AdminDomain",
            Self::ComputingService => "ComputingService",
            Self::ComputingManager => "ComputingManager",
            Self::ExecutionEnvironment => "ExecutionEnvironment",
        }
    }

    /// The kind that it is derived from.
    pub fn base(self) -> &'static str {
        match self {
            Self::AdminDomain => "Domain",
            Self::ComputingService => "Service",
            Self::ComputingManager => "Manager",
            Self::ExecutionEnvironment => "Resource",
        }
    }
}

/// A value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Text(String),
    Number(u64),
    /// True, false or undefined.
    Flag(Option<bool>),
    List(Vec<String>),
}

impl Value {
    /// Each value as text.
    pub fn texts(&self) -> Vec<String> {
        match self {
            Self::Text(text) => vec![text.clone()],
            Self::Number(number) => vec![number.to_string()],
            Self::Flag(flag) => vec![flag.map_or_else(|| "undefined".to_owned(), |flag| flag.to_string())],
            Self::List(words) => words.clone(),
        }
    }
}

/// Other entities: one, or any number of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Others {
    One(String),
    Many(Vec<String>),
    /// There is none, and a rendering that has a word for that must say so.
    None,
}

/// An entity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entity {
    pub kind: Kind,
    pub id: String,
    pub name: String,
    /// Other information, as `key=value`.
    pub other: Vec<String>,
    /// Local identifier and value.
    pub extensions: Vec<(String, String)>,
    /// The kind that an attribute is of (the entity's own or its base), its name and value, in the sequence of the specification.
    pub values: Vec<(&'static str, &'static str, Value)>,
    /// By the name of the association, in the sequence of the specification.
    pub associations: Vec<(&'static str, Others)>,
    /// For LDAP: the kind that has the key, the kind that it leads to, and the identifier.
    pub links: Vec<(&'static str, &'static str, String)>,
}

impl Entity {
    pub fn new(kind: Kind, id: &str, name: &str) -> Self {
        Self {
            kind,
            id: id.to_owned(),
            name: name.to_owned(),
            other: Vec::new(),
            extensions: Vec::new(),
            values: Vec::new(),
            associations: Vec::new(),
            links: Vec::new(),
        }
    }

    pub fn value(&mut self, of: &'static str, name: &'static str, value: Value) {
        self.values.push((of, name, value));
    }

    pub fn link(&mut self, of: &'static str, to: &'static str, id: &str) {
        self.links.push((of, to, id.to_owned()));
    }

    pub fn with_one(mut self, name: &'static str, id: &str) -> Self {
        self.associations.push((name, Others::One(id.to_owned())));
        self
    }

    pub fn with_none(mut self, name: &'static str) -> Self {
        self.associations.push((name, Others::None));
        self
    }

    pub fn with_many(mut self, name: &'static str, ids: Vec<String>) -> Self {
        self.associations.push((name, Others::Many(ids)));
        self
    }
}
