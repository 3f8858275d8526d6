//! XML, as GFD.209 has it.

use quick_xml::Writer;
use quick_xml::events::{BytesDecl, BytesEnd, BytesStart, BytesText, Event};

use super::entity::{Entity, Others};

const NAMESPACE: &str = "http://schemas.ogf.org/glue/2009/03/spec_2.0_r1";

/// A document in memory. Writing to it cannot fail.
struct Document(Writer<Vec<u8>>);

impl Document {
    fn event(&mut self, event: Event<'_>) {
        let _ = self.0.write_event(event);
    }

    fn open(&mut self, start: BytesStart<'_>) {
        self.event(Event::Start(start));
    }

    fn close(&mut self, name: &str) {
        self.event(Event::End(BytesEnd::new(name)));
    }

    fn element(&mut self, name: &str, text: &str) {
        self.open(BytesStart::new(name));
        // XML has no words for other control characters.
        let plain: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.event(Event::Text(BytesText::new(&plain)));
        self.close(name);
    }
}

pub(super) fn render(entities: &[Entity]) -> String {
    let mut out = Document(Writer::new_with_indent(Vec::new(), b' ', 2));
    out.event(Event::Decl(BytesDecl::new("1.0", Some("UTF-8"), None)));
    let mut root = BytesStart::new("GLUE2");
    root.push_attribute(("xmlns", NAMESPACE));
    out.open(root);
    for entity in entities {
        let name = entity.kind.name();
        let mut start = BytesStart::new(name);
        start.push_attribute(("BaseType", entity.kind.base()));
        out.open(start);
        attributes(&mut out, entity);
        out.open(BytesStart::new("Associations"));
        for (name, others) in &entity.associations {
            match others {
                Others::One(id) => out.element(name, id),
                Others::None => {}
                Others::Many(ids) => ids.iter().for_each(|id| out.element(name, id)),
            }
        }
        out.close("Associations");
        out.close(name);
    }
    out.close("GLUE2");
    let mut text = String::from_utf8_lossy(&out.0.into_inner()).into_owned();
    text.push('\n');
    text
}

fn attributes(out: &mut Document, entity: &Entity) {
    out.element("ID", &entity.id);
    out.element("Name", &entity.name);
    entity.other.iter().for_each(|text| out.element("OtherInfo", text));
    if !entity.extensions.is_empty() {
        out.open(BytesStart::new("Extensions"));
        for (id, value) in &entity.extensions {
            out.open(BytesStart::new("Extension"));
            out.element("LocalID", id);
            out.element("Key", "Accelerator");
            out.element("Value", value);
            out.close("Extension");
        }
        out.close("Extensions");
    }
    for (_, name, value) in &entity.values {
        value.texts().iter().for_each(|text| out.element(name, text));
    }
}
