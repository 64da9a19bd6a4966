#include "client/cli/json.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/duration.pb.h>
#include <google/protobuf/timestamp.pb.h>

#include <cmath>

#include "absl/time/time.h"
#include "client/error.h"

namespace stillhouse::client {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

Json Real(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

// `index` < 0: a singular field.
Json Value(const Message& message, const Reflection& reflection, const FieldDescriptor& field, int index) {
  const bool many = index >= 0;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return many ? reflection.GetRepeatedInt32(message, &field, index) : reflection.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64:
      return many ? reflection.GetRepeatedInt64(message, &field, index) : reflection.GetInt64(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return many ? reflection.GetRepeatedUInt32(message, &field, index) : reflection.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return many ? reflection.GetRepeatedUInt64(message, &field, index) : reflection.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return Real(many ? reflection.GetRepeatedDouble(message, &field, index) : reflection.GetDouble(message, &field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return Real(many ? reflection.GetRepeatedFloat(message, &field, index) : reflection.GetFloat(message, &field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return many ? reflection.GetRepeatedBool(message, &field, index) : reflection.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM: {
      const int number =
          many ? reflection.GetRepeatedEnumValue(message, &field, index) : reflection.GetEnumValue(message, &field);
      const auto* value = field.enum_type()->FindValueByNumber(number);
      return value != nullptr ? Json(value->name()) : Json(number);
    }
    case FieldDescriptor::CPPTYPE_STRING:
      return many ? reflection.GetRepeatedString(message, &field, index) : reflection.GetString(message, &field);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToJson(many ? reflection.GetRepeatedMessage(message, &field, index)
                         : reflection.GetMessage(message, &field));
  }
  return nullptr;
}

}  // namespace

Json ToJson(const Message& message) {
  const auto& descriptor = *message.GetDescriptor();
  if (descriptor.full_name() == "google.protobuf.Timestamp") {
    google::protobuf::Timestamp time;
    time.CopyFrom(message);
    return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ",
                            absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos()),
                            absl::UTCTimeZone());
  }
  if (descriptor.full_name() == "google.protobuf.Duration") {
    google::protobuf::Duration duration;
    duration.CopyFrom(message);
    return Real(static_cast<double>(duration.seconds()) + duration.nanos() * 1e-9);
  }
  const Reflection& reflection = *message.GetReflection();
  Json json = Json::object();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    if (field.is_repeated()) {
      Json& list = json[field.name()] = Json::array();
      const int size = reflection.FieldSize(message, &field);
      for (int j = 0; j < size; ++j) list.push_back(Value(message, reflection, field, j));
    } else if (!field.has_presence() || reflection.HasField(message, &field)) {
      json[field.name()] = Value(message, reflection, field, -1);
    }
  }
  return json;
}

Json ErrorJson(const absl::Status& status) {
  Json error;
  error["code"] = CodeName(static_cast<int>(status.code()));
  error["message"] = std::string(status.message());
  switch (OriginOf(status)) {
    case Origin::kLocal:
      error["origin"] = "client";
      break;
    case Origin::kServer:
      error["origin"] = "server";
      break;
    case Origin::kTransport:
      error["origin"] = "transport";
      break;
  }
  if (const std::string reason = Reason(status); !reason.empty()) error["reason"] = reason;
  if (const auto delay = RetryDelay(status)) error["retry_seconds"] = absl::ToDoubleSeconds(*delay);
  return Json{{"error", error}};
}

std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace stillhouse::client
