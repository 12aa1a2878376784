// SPDX-License-Identifier: Apache-2.0
// Where messages go, and the five parts of an error.
#pragma once
#include <NvInferRuntime.h>

#include <stdexcept>
#include <string>

namespace flash_export {

// The host (TensorRT's plugin registry) hands over its logger through this. Null: messages go to stderr.
void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept;

// Writes one message. Never throws: it is called at the noexcept edges.
void log(nvinfer1::ILogger::Severity severity, char const* text) noexcept;

// What failed, where, what we got, what we need, what to do; the form that both commands print too.
class PluginError : public std::runtime_error {
 public:
  PluginError(std::string const& what, std::string const& where, std::string const& got,
              std::string const& need, std::string const& todo);
};

// Runs `body` at an entry point of TensorRT: an exception becomes a message and `failed` is returned.
template <class Result, class Body>
Result guarded(char const* entry, Result failed, Body&& body) noexcept {
  using Severity = nvinfer1::ILogger::Severity;
  try {
    return body();
  } catch (PluginError const& error) {
    log(Severity::kERROR, error.what());
  } catch (std::exception const& error) {
    log(Severity::kINTERNAL_ERROR, entry);
    log(Severity::kINTERNAL_ERROR, error.what());
  } catch (...) {
    log(Severity::kINTERNAL_ERROR, entry);
  }
  return failed;
}

}  // namespace flash_export
