{{- define "specserve.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "specserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "specserve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{ include "specserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "specserve.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "specserve.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "specserve.image" -}}
{{- $tag := .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.device) -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}

{{- /* The Secret with the key file; empty where no keys are needed. */ -}}
{{- define "specserve.secret" -}}
{{- if .Values.auth.keys -}}
{{- include "specserve.name" . -}}
{{- else -}}
{{- .Values.auth.existingSecret -}}
{{- end -}}
{{- end -}}

{{- /* A value as TOML: JSON, but for tables. */ -}}
{{- define "specserve.toml" -}}
{{- if kindIs "map" . -}}
{ {{- range $i, $key := keys . | sortAlpha -}}
{{- if $i }}, {{ end }}{{ $key | toJson }} = {{ include "specserve.toml" (get $ $key) }}
{{- end -}} }
{{- else if kindIs "slice" . -}}
[{{- range $i, $item := . -}}{{- if $i }}, {{ end }}{{ include "specserve.toml" $item }}{{- end -}}]
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- /* config.toml; a key that is null is left out. */ -}}
{{- define "specserve.config" -}}
{{- range $section, $keys := .Values.config }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "specserve.toml" $value }}
{{- end }}
{{- end }}
{{ end }}
{{- end -}}

{{- /* Readiness needs a key where the server has keys, and a probe of HTTP cannot read a Secret. */ -}}
{{- define "specserve.ready" -}}
{{- if include "specserve.secret" . -}}
exec: {command: [specserve-probe, /health/ready, /etc/specserve/keys/api-keys]}
{{- else -}}
httpGet: {path: /health/ready, port: http}
{{- end }}
periodSeconds: {{ .Values.probes.periodSeconds }}
timeoutSeconds: 5
{{- end -}}

{{- /* What the schema of the values cannot say. */ -}}
{{- define "specserve.refuse" -}}
{{- $auth := .Values.auth -}}
{{- $ways := 0 -}}
{{- range list $auth.keys $auth.existingSecret $auth.allowNoKeys -}}
{{- if . }}{{ $ways = add1 $ways }}{{ end -}}
{{- end -}}
{{- if ne (int $ways) 1 -}}
{{- fail "auth: set exactly one of auth.keys, auth.existingSecret and auth.allowNoKeys = true" -}}
{{- end -}}
{{- range list "host" "port" "api_key_file" "allow_no_keys" -}}
{{- if hasKey $.Values.config.server . -}}
{{- fail (printf "config.server.%s is set by the chart: leave it out (auth and service have what there is to choose)" .) -}}
{{- end -}}
{{- end -}}
{{- range list "tls_certificate_file" "tls_key_file" -}}
{{- if get $.Values.config.server . -}}
{{- fail (printf "config.server.%s: TLS is the ingress's: leave it out, and set ingress.tlsSecret" .) -}}
{{- end -}}
{{- end -}}
{{- range list "max_requests_per_key" "max_tokens_per_minute_per_key" -}}
{{- if and $auth.allowNoKeys (get $.Values.config.server .) -}}
{{- fail (printf "config.server.%s needs keys: set auth.keys or auth.existingSecret instead of auth.allowNoKeys, or leave it out" .) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.config.server.stream_interval_ms (ne (.Values.config.server.stream_flush | default "event") "interval") -}}
{{- fail "config.server.stream_interval_ms is of no use without config.server.stream_flush = interval: set that, too, or leave it out" -}}
{{- end -}}
{{- if hasKey (.Values.config.model | default dict) "device" -}}
{{- fail "config.model.device is set by the chart: set device = cpu or cuda instead" -}}
{{- end -}}
{{- $parallel := .Values.config.parallel | default dict -}}
{{- $ranks := mul (get $parallel "tensor" | default 1) (get $parallel "pipeline" | default 1) -}}
{{- if or (get $parallel "address") (get $parallel "secret_file") -}}
{{- fail "config.parallel.address: all ranks of a server are in its pod: leave it and secret_file out" -}}
{{- end -}}
{{- if and (eq .Values.device "cuda") (ne (int $ranks) (int .Values.gpus)) -}}
{{- fail (printf "gpus = %d, but config.parallel has %d ranks, which use a GPU each: set gpus = %d" (int .Values.gpus) (int $ranks) (int $ranks)) -}}
{{- end -}}
{{- range .Values.extraArgs -}}
{{- if or (regexMatch "^--(tensor|pipeline)-parallel-size" .) (regexMatch "parallel\\.\\w+=" .) -}}
{{- fail (printf "extraArgs: %s: set config.parallel instead" .) -}}
{{- end -}}
{{- if or (regexMatch "^--(config|host|port|api-key-file|allow-no-keys)(=|$)" .) (regexMatch "(server\\.(host|port|api_key_file|allow_no_keys)|model\\.device)=" .) -}}
{{- fail (printf "extraArgs: %s is set by the chart: leave it out" .) -}}
{{- end -}}
{{- if or (regexMatch "^--(tls|ssl)-" .) (regexMatch "server\\.tls_\\w+=" .) -}}
{{- fail (printf "extraArgs: %s: TLS is the ingress's: leave it out, and set ingress.tlsSecret" .) -}}
{{- end -}}
{{- end -}}
{{- $scales := ne .Values.autoscaling.kind "none" -}}
{{- if and $scales (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail "autoscaling.minReplicas exceeds autoscaling.maxReplicas: raise the second or lower the first" -}}
{{- end -}}
{{- if and (eq .Values.autoscaling.kind "keda") (not .Values.autoscaling.prometheusAddress) -}}
{{- fail "autoscaling.kind = keda asks Prometheus: set autoscaling.prometheusAddress" -}}
{{- end -}}
{{- if and .Values.router.enabled (not $auth.allowNoKeys) -}}
{{- fail "router.enabled needs servers without keys, as vllm-router asks /health without one: set auth.allowNoKeys = true instead of keys, and check them before the router" -}}
{{- end -}}
{{- if and .Values.router.enabled (not .Values.router.image) -}}
{{- fail "router.enabled needs an image that has vllm-router: set router.image" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) -}}
{{- fail "ingress.enabled needs a host name: set ingress.host" -}}
{{- end -}}
{{- range list "model" "drafter" -}}
{{- $section := get $.Values.config . | default dict -}}
{{- $path := ternary (get $section "path") (get $section "model") (eq . "model") | default "" -}}
{{- if and (hasPrefix "/models/" $path) (not $.Values.models.existingClaim) -}}
{{- fail (printf "config.%s names %s, and nothing is mounted at /models: set models.existingClaim" . $path) -}}
{{- end -}}
{{- if and $path (not (hasPrefix "/" $path)) $.Values.networkPolicy.enabled (not $.Values.networkPolicy.allowEgress) (not $.Values.cache.existingClaim) -}}
{{- fail (printf "config.%s names %s, which is downloaded, and networkPolicy.allowEgress = false forbids that: name a folder in /models, or a cache that has it" . $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
