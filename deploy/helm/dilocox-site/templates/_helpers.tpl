{{/* Name of all objects. A pod's host name is this name with a number. */}}
{{- define "site.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}

{{- define "site.labels" -}}
app.kubernetes.io/name: dilocox-site
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* Labels by which the service finds the pods. */}}
{{- define "site.selector" -}}
app.kubernetes.io/name: dilocox-site
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "site.secret" -}}
{{ .Values.existingSecret | default (include "site.name" .) }}
{{- end -}}
