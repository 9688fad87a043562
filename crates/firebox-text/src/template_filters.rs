//! The filters of templates, within the limits on what they may build.

use crate::template_limits::{before, fit, kept, stored};
use crate::template_operators::{EACH, FIT, KEPT, STORED, TEXT};
use crate::template_python;
use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, filters, functions};

/// Wraps filters whose result can be larger than their input, or a copy of it, with the limits.
pub(crate) fn install(environment: &mut Environment<'_>) {
    environment.add_filter(FIT, fit);
    // Size is checked first, because the value may be too large to traverse.
    environment.add_filter(TEXT, |value: &Value| template_python::operand(&fit(value)?));
    environment.add_filter(EACH, template_python::each);
    environment.add_filter(KEPT, kept);
    environment.add_filter(STORED, stored);
    let filters = [
        ("batch", Value::from_function(filters::batch)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("chain", Value::from_function(chain)),
        ("escape", Value::from_function(filters::escape)),
        ("e", Value::from_function(filters::escape)),
        ("format", Value::from_function(filters::format)),
        ("indent", Value::from_function(filters::indent)),
        ("join", Value::from_function(filters::join)),
        ("list", Value::from_function(filters::list)),
        ("lower", Value::from_function(filters::lower)),
        ("pprint", Value::from_function(filters::pprint)),
        ("replace", Value::from_function(filters::replace)),
        ("reverse", Value::from_function(filters::reverse)),
        ("slice", Value::from_function(filters::slice)),
        ("sort", Value::from_function(filters::sort)),
        ("string", Value::from_function(template_python::string)),
        ("sum", Value::from_function(filters::sum)),
        ("title", Value::from_function(filters::title)),
        ("trim", Value::from_function(filters::trim)),
        ("upper", Value::from_function(filters::upper)),
    ];
    for (name, filter) in filters {
        environment.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            before(name, &args, false)?;
            fit(&filter.call(state, &args)?)
        });
    }
}

/// The filter `chain`. minijinja's evaluates its arguments lazily, so chains could nest without end.
fn chain(state: &State<'_, '_>, value: Value, others: Rest<Value>) -> Result<Value, Error> {
    let chained = filters::chain(state, value, others)?;
    match chained.kind() {
        ValueKind::Map => functions::dict(Some(chained), Kwargs::from_iter(Vec::<(String, Value)>::new())),
        _ => Ok(chained.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?.into()),
    }
}
